"""Read the answers of a reward process, which may hold anything."""

from __future__ import annotations

import json
from typing import Any

from coupler.rewards.process import WorkerDied
from coupler.rewards.result import Invalid, Scored
from coupler.rewards.value import FLOAT32_MAX


def read_answer(line: bytes, size: int, late: str) -> list[Scored]:
    """Read the answer to a call of ``size`` completions.

    ``late`` is the reason of an async call that took too long.

    Raises:
        WorkerDied: it is none, so the process is of no more use.
    """
    try:
        results, seconds, trace = json.loads(line)
        if len(results) != size or not isinstance(trace, str):
            raise ValueError
        return [
            _result(*result, seconds=max(0.0, float(seconds)), trace=trace, late=late)
            for result in results
        ]
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise WorkerDied("gave no answer of the kind that it must") from None


def _result(
    number: Any,
    reason: Any,
    answer: Any,
    parts: Any,
    *,
    seconds: float,
    trace: str,
    late: str,
) -> Scored:
    """Read what was said of one completion.

    Raises:
        ValueError: it is no result, and so are some errors of other types.
    """
    texts = [reason, answer or ""]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError
    return Scored(
        result=Invalid(reason) if number is None else _finite(number),
        seconds=seconds,
        answer=answer,
        parts={str(name): _finite(part) for name, part in parts.items()},
        detail=trace,
        timed_out=number is None and reason == late,
    )


def _finite(number: Any) -> float:
    number = float(number)
    # Also false for NaN.
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError
    return number
