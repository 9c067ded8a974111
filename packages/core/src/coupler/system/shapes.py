"""Tell whether a value that somebody else made has the types that it should have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from coupler.errors import CouplerError, WeightSyncError

MAX_LISTED = 1000


class WrongShape(CouplerError):
    """A value is not what somebody says that it is."""


def check_receipt(receipt: Any, kind: type, who: str) -> None:
    """Check that a plugin returned a receipt of a weight transfer.

    Raises:
        WeightSyncError: it is something else.
    """
    if not isinstance(receipt, kind):
        raise WeightSyncError(
            f"{who} returned a {type(receipt).__name__} for weights that it was given, not a "
            f"{kind.__name__}.\n  try:  another backend"
        )


def fits(value: Any, shape: Any) -> bool:
    """Compare plain data with a shape.

    A shape is a type, ``[shape]`` for any number, ``(shape, shape)`` for as many,
    ``{type: shape}`` for any keys, or ``{"key": shape}`` for those keys and no others.
    """
    if isinstance(shape, list):
        return isinstance(
            value,
            list,
        ) and all(fits(each, shape[0]) for each in value)
    if isinstance(shape, tuple):
        is_list = isinstance(
            value,
            list | tuple,
        ) and len(value) == len(shape)
        return is_list and all(
            fits(
                v,
                s,
            )
            for v, s in zip(value, shape, strict=True)
        )

    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        (first, of), *_ = shape.items()
        if isinstance(first, type):
            return all(
                fits(
                    k,
                    first,
                )
                and fits(v, of)
                for k, v in value.items()
            )
        return value.keys() == shape.keys() and all(
            fits(
                value[k],
                s,
            )
            for k, s in shape.items()
        )
    return type(value) is shape


def each_of(
    who: str,
    found: Any,
    kind: type[Any],
) -> list[Any]:
    """Return what a hook answers as a list of ``kind``.

    Raises:
        WrongShape: it answers something else.
    """
    if isinstance(
        found,
        str | bytes | Mapping,
    ) or not isinstance(found, Iterable):
        raise WrongShape(f"{who} returns {shown(found)}, and has to list {_plural(kind)}")
    listed = list(islice(found, MAX_LISTED + 1))
    if len(listed) > MAX_LISTED:
        raise WrongShape(f"{who} lists more than {MAX_LISTED} {_plural(kind)}")
    if wrong := [
        each
        for each in listed
        if not isinstance(
            each,
            kind,
        )
    ]:
        raise WrongShape(f"{who} lists {shown(wrong[0])}, and has to list {_plural(kind)}")
    return listed


def shown(value: Any) -> str:
    """Show a plain value, and of any other one its type only."""
    plain = value is None or type(value) in (str, int, float, bool)
    return f"{value!r:.60}" if plain else f"a {type(value).__name__}"


def _plural(kind: type) -> str:
    return "texts" if kind is str else f"{kind.__name__}s"
