"""Write messages to people: on the console, and in a run's ``coupler.log``.

Modules take a logger with :func:`get_logger` and use it as any logger of the standard
library. The first one brings a console handler for the logger ``coupler``, so that jobs
which are called from Python speak, too. A program that wants the messages elsewhere
gives ``logging.getLogger("coupler")`` a handler before it imports Coupler; then no
handler of ours is added.

The console shows ``coupler: TEXT`` on stdout, and from warnings on
``coupler: warning: TEXT`` on stderr. ``COUPLER_LOG=debug|info|warning|error`` says
which messages are shown and kept. The default is info. ``coupler COMMAND -v`` is debug,
and ``-q`` is warning.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coupler.errors import ConfigError
from coupler.system.files import make_own

ROOT = "coupler"
VARIABLE = "COUPLER_LOG"
LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}

# extra= of a message that the console shows as it is, such as a table.
PLAIN = {"plain": True}
# extra= of a message that goes to stderr although it is no warning.
URGENT = {"urgent": True}


def get_logger(module: str) -> logging.Logger:
    """Return the logger of a module (``__name__``), which shows what it is told."""
    root = logging.getLogger(ROOT)
    if not root.handlers:
        root.addHandler(Console())
        root.setLevel(LEVELS.get(_asked(), logging.INFO))
        # A handler of the root logger would show every message again.
        root.propagate = False
    return logging.getLogger(module if module.partition(".")[0] == ROOT else f"{ROOT}.{module}")


def configure(level: str = "") -> None:
    """Set the level, by default the one that ``COUPLER_LOG`` asks for. The command line
    calls this first.

    Raises:
        ConfigError: there is no such level.
    """
    asked = level or _asked()
    if asked not in LEVELS:
        raise ConfigError(f"{VARIABLE}={asked} is no level.\n  set it to:  {', '.join(LEVELS)}")
    get_logger(ROOT).setLevel(LEVELS[asked])


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Append every message to ``path`` while the block lasts, each with its time.

    The file is made with the first message. A disk that refuses it stops no run.
    """
    handler = _File(path, delay=True, encoding="utf-8")
    # A pipe would wait for a reader, and a link leads to a file of somebody else.
    with suppress(OSError):  # Of a disk that does not say, the first message tells.
        handler.refused = os.path.lexists(path) and (path.is_symlink() or not path.is_file())
        make_own(path)
    if handler.refused:
        get_logger(__name__).warning(f"{path} is no file, so that no messages are kept there.")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    root = get_logger(ROOT)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


class Console(logging.Handler):
    """Prints to what ``sys.stdout`` and ``sys.stderr`` are at the time of a message."""

    def emit(self, record: logging.LogRecord) -> None:
        warns = record.levelno >= logging.WARNING
        stream = sys.stderr if warns or getattr(record, "urgent", False) else sys.stdout
        head = "coupler: warning: " if warns else "coupler: "
        if getattr(record, "plain", False):
            head = ""

        # A terminal that went away stops no run.
        with suppress(OSError):
            print(f"{head}{self.format(record)}", file=stream, flush=True)


class _File(logging.FileHandler):
    """Tells the console once where the file cannot be written, and then is silent."""

    refused = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.refused:
            return
        try:
            super().emit(record)
        except OSError as error:
            # The file cannot be opened.
            self._refuse(error)

    def handleError(self, record: logging.LogRecord) -> None:
        """Turn a full disk into one warning instead of a traceback for each message."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._refuse(error)
        else:
            super().handleError(record)

    def _refuse(self, error: OSError) -> None:
        self.refused = True
        logging.getLogger(__name__).warning(
            f"{self.baseFilename} cannot be written: {error.strerror}."
        )


def _asked() -> str:
    return os.environ.get(VARIABLE, "").strip().lower() or "info"
