"""Define the results of a reward call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invalid:
    """Say that a call gave no reward, and why.

    The sample is left out and counted, and never gets a silent zero. Too many of them
    stop the run.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Graded:
    """Give a reward together with the answer that was read in the completion.

    Evaluation votes over these answers.
    """

    reward: float
    answer: str

    def __float__(self) -> float:
        return float(self.reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Record one reward call: its result, its time and its traceback."""

    result: float | Invalid
    # The time inside the function, or the limit if the call was killed.
    seconds: float
    # The answer that the function read, if it named one.
    answer: str | None = None
    # The traceback, or the last lines on stderr of a worker that hung or died.
    detail: str = ""
    timed_out: bool = False
