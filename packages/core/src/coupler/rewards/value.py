"""Read what a reward function returned or raised, whatever it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from math import isfinite
from numbers import Complex, Real
from typing import Any, SupportsFloat

from coupler.rewards.result import Graded, Invalid, Scored

FLOAT32_MAX = 3.4028234663852886e38
MAX_REASON, MAX_ANSWER, MAX_PARTS = 300, 65_536, 64
PART = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)  # a name of a metric
TEXTS = (str, bytes, bytearray, memoryview)


# number or None, the reason where there is none, the answer that was read, and parts
Checked = tuple[float | None, str, str | None, dict[str, float]]


def checked(value: Any) -> Checked:
    """Return what a reward function said of one completion.

    Raises:
        BaseException: whatever the value's own methods raise.
    """
    if isinstance(value, Invalid):
        return None, said(lambda: value.reason, MAX_REASON), None, {}
    if isinstance(value, dict):
        if "reward" not in value:
            return None, "returned a dict without the key reward", None, {}
        others = {key: part for key, part in value.items() if key != "reward"}
        value = Graded(value["reward"], parts=others)
    if not isinstance(value, Graded):
        return *_number(value), None, {}

    number, reason = _number(value.reward)
    answer = None if value.answer is None else said(lambda: value.answer, MAX_ANSWER)
    parts, wrong = _parts(value.parts)
    if wrong and number is not None:
        return None, wrong, None, {}
    return number, reason, answer, parts


def each(value: Any, size: int) -> list[Checked]:
    """Return what a reward function said of each of ``size`` completions.

    Raises:
        BaseException: whatever the value's own methods raise.
    """
    kind = name(type(value))[:100]
    if isinstance(value, (*TEXTS, dict)) or not isinstance(value, Iterable):
        return [checked(Invalid(f"returned a {kind}, not {size} rewards"))] * size

    found = list(islice(value, size + 1))
    if len(found) == size:
        return [checked(one) for one in found]
    count = f"more than {size}" if found[size:] else len(found)
    return [checked(Invalid(f"returned {count} rewards for {size} completions"))] * size


def _parts(parts: Mapping[Any, Any]) -> tuple[dict[str, float], str]:
    """Return the parts of a reward, or why they are none."""
    found: dict[str, float] = {}
    if len(parts) > MAX_PARTS:
        return {}, f"returned {len(parts)} parts, more than {MAX_PARTS}"

    for key, value in parts.items():
        if not PART.fullmatch(shown := said(partial(str, key), MAX_REASON)):
            return {}, f"returned a part {shown[:100]!r}, whose name is none"
        number, reason = _number(value)
        if number is None:
            return {}, f"{reason}, as the part {shown}"
        found[shown] = number
    return found, ""


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
