"""Bounded waits for what another thread or process provides."""

from __future__ import annotations

import time
from collections.abc import Callable

from coupler.errors import WaitTimeout


def wait_until(ready: Callable[[], bool], name: str, seconds: float) -> None:
    """Poll ``ready`` until it is true.

    Raises:
        WaitTimeout: ``seconds`` passed; the message says what was waited for.
    """
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise WaitTimeout(f"waited {seconds:.0f} s for {name}.\n  look at:  the sender's log, sync.deadline_s")
        time.sleep(0.002)


def num_bytes(tensor: object) -> int:
    """Size of a NumPy array or a torch tensor."""
    return int(tensor.nbytes)  # type: ignore[attr-defined]
