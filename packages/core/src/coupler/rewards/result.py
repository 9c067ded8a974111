"""What a reward call gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invalid:
    """Not a reward: its sample is left out and counted, and too many of them stop the run. Never a silent zero."""

    reason: str


@dataclass(frozen=True, slots=True)
class Graded:
    """A reward, and what the function took for the answer in the completion: evaluation then votes over answers."""

    reward: float
    answer: str

    def __float__(self) -> float:
        return float(self.reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One reward call as it went."""

    result: float | Invalid
    seconds: float  # inside the function; the limit if it was killed
    answer: str | None = None  # where the function says what it read
    detail: str = ""  # the traceback, or the last lines on stderr of a worker that hung or died
    timed_out: bool = False
