"""Run the command line. Every command imports only the modules it needs: listing
plugins imports no Hydra.

``parser.py`` has the table of commands, and ``commands/`` one module for each.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from io import TextIOWrapper

from coupler.cli.parser import parse
from coupler.errors import CouplerError
from coupler.system.files import DISK_ERRORS
from coupler.system.log import configure

USER_ERROR, INTERRUPTED, NO_READER = 2, 130, 141


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    It is 2 for an error that the user can fix, which is printed without a traceback,
    130 for Ctrl-C, and 141 where nobody reads the output any more. ``doctor`` returns 1
    if it found a problem, and ``doctor data`` 2 if the run would be refused.
    """
    try:
        _print_every_letter()
        configure()
        arguments = parse(sys.argv[1:] if argv is None else argv)
        configure(arguments.level)
        code = arguments.command(arguments) or 0
        sys.stdout.flush()  # A pipe that was closed shows here, not at the exit.
        return code

    except CouplerError as exc:
        print(f"coupler: {_in_order(str(exc))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("coupler: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        _drop_the_rest()
        return NO_READER
    except OSError as error:
        # An error of a file names it. This one is of stdout.
        if error.filename is not None or error.errno not in DISK_ERRORS:
            raise
        print(f"coupler: what is printed cannot be written: {error.strerror}.", file=sys.stderr)
        _drop_the_rest()
        return USER_ERROR


def _in_order(text: str) -> str:
    """Indent what follows the first line, which may come from a library."""
    first, *rest = [line for line in text.splitlines() if line.strip()] or [""]
    return "\n".join([first, *(line if line.startswith(" ") else f"  {line}" for line in rest)])


def _print_every_letter() -> None:
    """Escape letters that stdout has no bytes for, as in a locale without UTF-8."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_the_rest() -> None:
    """Let text that is still in the buffer of stdout not raise at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_is_gone() -> bool:
    """Tell a closed stdout, as in ``coupler plugins | head -1``, from other pipes."""
    with suppress(OSError, ValueError, AttributeError):  # Windows has no poll.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    return False
