"""Bounded waits for what another thread or process provides."""

from __future__ import annotations

import time
from collections.abc import Callable

from coupler.errors import WaitTimeout


def wait_until(
    ready: Callable[[], bool],
    name: str,
    seconds: float,
    *,
    every: float = 0.002,
    look_at: str = "the sender's log",
) -> None:
    """Ask ``ready`` every ``every`` seconds until it is true.

    An exception of ``ready`` ends the wait.

    Raises:
        WaitTimeout: ``seconds`` passed. The message says what was waited for.
    """
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise WaitTimeout(
                f"waited {seconds:.0f} s for {name}.\n  look at:  {look_at}, sync.deadline_s"
            )
        time.sleep(every)


def num_bytes(tensor: object) -> int:
    """Return the size of a NumPy array or a torch tensor."""
    return int(tensor.nbytes)  # type: ignore[attr-defined]
