"""Define the results of a reward call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Invalid:
    """Say that a call gave no reward, and why.

    The sample is left out and counted, and never gets a silent zero. Too many of them
    stop the run.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Graded:
    """Give a reward together with what it was made of.

    Attributes:
        answer: the answer that was read in the completion. Evaluation votes over these.
        parts: numbers that the reward was made of, by name. Their means are tracked as
            ``reward_parts/NAME``, and algorithms see each as a column of that name.
    """

    reward: float
    answer: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

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
    # The numbers that the reward was made of, by name.
    parts: Mapping[str, float] = field(default_factory=dict)
    # What models said of the episode before the call: score and verdict, where asked.
    opinions: Mapping[str, float | str] = field(default_factory=dict)
    # The traceback, or the last lines on stderr of a worker that hung or died.
    detail: str = ""
    timed_out: bool = False
