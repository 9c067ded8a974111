"""Read what a reward function returned or raised, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from numbers import Complex, Real
from typing import Any, SupportsFloat

from coupler.rewards.result import Graded, Invalid, Scored

FLOAT32_MAX = 3.4028234663852886e38
MAX_REASON, MAX_ANSWER = 300, 65_536
TEXTS = (str, bytes, bytearray, memoryview)


def checked(value: Any) -> tuple[float | None, str, str | None]:
    """Return the number, the reason where there is none, and the answer that was read.

    Raises:
        BaseException: whatever the value's own methods raise.
    """
    if isinstance(value, Invalid):
        return None, said(lambda: value.reason, MAX_REASON), None
    if not isinstance(value, Graded):
        return *_number(value), None

    number, reason = _number(value.reward)
    answer = None if value.answer is None else said(lambda: value.answer, MAX_ANSWER)
    return number, reason, answer


def judged(value: Any, invalid: str = "") -> Scored:
    """Return the result of a reward that was computed in this process.

    Args:
        invalid: why there is none. Empty where there is one.
    """
    number, reason = (None, invalid) if invalid else _number(value)
    return Scored(result=Invalid(reason) if number is None else number, seconds=0.0)


def _number(value: Any) -> tuple[float | None, str]:
    if type(value) not in (float, int) and not _is_number(value):
        return None, f"returned a {name(type(value))[:100]}, not a number"

    try:
        number = float(value)
    except OverflowError:
        return None, "returned a number beyond float32"
    if not isfinite(number):
        return None, f"returned {number}"
    # A batch holds rewards as float32.
    if abs(number) > FLOAT32_MAX:
        return None, f"returned {number:g}, which is beyond float32"
    return number, ""


def _is_number(value: Any) -> bool:
    if isinstance(value, (*TEXTS, Graded)):
        return False
    if isinstance(value, Complex) and not isinstance(value, Real):
        return False
    return isinstance(value, SupportsFloat)


def said(text: Callable[[], Any], limit: int) -> str:
    """Return ``text()`` as characters that can be written, at most ``limit`` of them.

    What raises, or is longer, is said so.
    """
    try:
        # The characters alone, where it is of a class derived from str.
        plain = str.__getitem__(str(text()), slice(limit + 1))
    except BaseException as error:
        return f"(its text cannot be had: {name(type(error))})"
    plain = plain.encode("utf-8", "replace").decode()
    return plain if len(plain) <= limit else f"{plain[: limit - 4]} ..."


def name(kind: type) -> str:
    """Return the name of a class, whatever its metaclass says."""
    return type.__dict__["__name__"].__get__(kind)
