"""Tell whether a value that a user wrote is of a plain type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, get_args, get_origin

# Counts of steps, tokens and seeds are kept in this many bits, with a sign.
MAX_INTEGER = 2**63 - 1
INTEGER = re.compile(r"[+-]?(0|[1-9]\d{0,18})", re.ASCII)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
TRUTHS = ("true", "false", "yes", "no", "on", "off", "y", "n", "1", "0")
# The longest part of a value that a message repeats.
SHOWN = 80


def is_of(kind: Any, value: Any) -> bool:
    """Tell whether ``value`` is of ``kind``, or a text that is read as one.

    Other kinds than int, float, bool, str, and lists and mappings of them hold any
    value. A number must be finite and an integer must fit into 64 bits.
    """
    inner = get_args(kind)
    if type(None) in inner and value is None:
        return True

    if get_origin(kind) is list:
        return isinstance(value, list) and all(is_of(inner[0], entry) for entry in value)
    if kind is dict or get_origin(kind) is dict:
        of = inner[1] if inner else Any
        return (
            isinstance(value, Mapping)
            and holds_text(value)
            and all(is_of(of, each) for each in value.values())
        )
    if type(None) in inner:
        return any(is_of(each, value) for each in inner if each is not type(None))
    return CHECKS[kind](value) if kind in CHECKS else holds_text(value)


def holds_text(value: Any) -> bool:
    """Tell whether every text in a value can be written to a file and named to the
    operating system.
    """
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= each <= "\udfff" for each in value)
    if isinstance(value, Mapping):
        return all(holds_text(key) and holds_text(inner) for key, inner in value.items())
    return all(map(holds_text, value)) if isinstance(value, list) else True


def shown(value: Any) -> str:
    """Return the words for a value in a message, which are never long."""
    if value is None:
        return "null"
    if type(value) is int and abs(value) > MAX_INTEGER:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value) if not holds_text(value) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _is_integer(value: Any) -> bool:
    if isinstance(value, str):
        return bool(INTEGER.fullmatch(value)) and abs(int(value)) <= MAX_INTEGER
    return type(value) is int and abs(value) <= MAX_INTEGER


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return bool(NUMBER.fullmatch(value)) and isfinite(float(value))
    if type(value) is int:
        return abs(value) < 1 << 1023
    return type(value) is float and isfinite(value)


def _is_truth(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in TRUTHS
    return type(value) is bool or (type(value) is int and value in (0, 1))


def _is_text(value: Any) -> bool:
    return type(value) in (str, int, float) and holds_text(value)


CHECKS: dict[Any, Callable[[Any], bool]] = {
    int: _is_integer,
    float: _is_number,
    bool: _is_truth,
    str: _is_text,
}
