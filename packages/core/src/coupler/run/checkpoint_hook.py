"""Call the user's function with each checkpoint, once it is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coupler.errors import ConfigError, CouplerError
from coupler.system.imports import resolve
from coupler.system.log import get_logger
from coupler.system.threads import in_daemon

log = get_logger(__name__)

KEY = "checkpoint.hook"


def load_hook(target: str) -> Callable[[Path], Any] | None:
    """Import ``checkpoint.hook``, or return None where it is not set.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    if not target:
        return None
    try:
        found = resolve(target)
    except CouplerError as error:
        raise ConfigError(f"{KEY}={target}: {error}") from None
    # The user's module is the boundary: its import raises what it likes.
    except Exception as error:
        raise ConfigError(f"{KEY}={target} cannot be imported: {error!r}.") from None

    if not callable(found):
        raise ConfigError(f"{KEY}={target} is no function, which takes the folder of a checkpoint.")
    return found


async def call_hook(
    hook: Callable[[Path], Any],
    folder: Path,
    seconds: float,
) -> None:
    """Call ``hook`` with the folder. A hook that fails or hangs is a warning.

    It runs in a thread of its own, so that training goes on meanwhile.

    Args:
        seconds: wait this long. A hook that takes longer is left alone.
    """

    def checkpoint_hook() -> str:
        try:
            hook(folder)
        # The user's code is the boundary: it never ends the run.
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return ""

    calling = in_daemon(checkpoint_hook)
    await asyncio.wait({calling}, timeout=seconds)
    if not calling.done():
        calling.cancel()
        log.warning(
            f"{KEY} has not returned after {seconds:.0f} s for {folder}: the run goes on without it"
        )
    elif why := await calling:
        log.warning(f"{KEY} failed for {folder}, and the run goes on: {why}")
