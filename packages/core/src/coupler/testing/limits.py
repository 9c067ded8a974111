"""Give every test of the kit a time limit, and end it with a sentence."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import pytest

# Code that never comes back to Python, such as a collective, cannot be interrupted by a
# signal. The process ends then, with the stacks of its threads.
GRACE_S = 60.0


@contextmanager
def limited(name: str, seconds: float) -> Iterator[None]:
    """Fail with ``name`` where the body takes longer than ``seconds``; 0 sets no limit.

    The signal of a timer interrupts Python. Where there is none, as on Windows, or
    where something else uses it, the process ends after the limit and ``GRACE_S``.
    """
    if not seconds:
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        pytest.fail(f"expected {name} to end within {seconds:g} s, it still runs")

    timer = hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    if timer:
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    with suppress(ValueError, OSError, AttributeError):  # stderr has no file here
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=sys.__stderr__ or 2)

    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if timer:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
