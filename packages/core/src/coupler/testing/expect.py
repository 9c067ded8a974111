"""Compare what came with what the kit expects, and say both where they differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

SHOWN = 200  # characters of a value in a message


def same(got: Any, want: Any, what: str) -> None:
    """Fail unless both are equal. ``what`` names the thing, as in "the finish"."""
    assert got == want, f"expected {what} to be {_text(want)}, came {_text(got)}"


def near(got: float, want: float, what: str, rel: float = 1e-6, abs_: float = 0.0) -> None:
    """Fail unless both numbers are equal up to a share ``rel``, or up to ``abs_``."""
    close = math.isclose(got, want, rel_tol=rel, abs_tol=abs_)
    assert close, f"expected {what} to be {want:.6g}, came {got:.6g}"


def numbers(got: Mapping[str, float], want: Mapping[str, float], what: str, rel: float) -> None:
    """Fail unless every number of ``want`` is in ``got``, equal up to ``rel``."""
    for name, number in want.items():
        assert name in got, f"expected {what} to have {name}, it has {sorted(got)}"
        near(got[name], number, f"{name} of {what}", rel=rel, abs_=1e-9)


def below(got: float, limit: float, what: str) -> None:
    """Fail unless a number is below its limit. NaN is below none."""
    assert got < limit, f"expected {what} below {limit:.3g}, came {got:.4g}"


def above(got: float, limit: float, what: str) -> None:
    """Fail unless a number is above its limit. NaN is above none."""
    assert got > limit, f"expected {what} above {limit:.3g}, came {got:.4g}"


def holds(found: Any, what: str, came: Any = "") -> None:
    """Fail with the whole sentence ``what`` unless ``found`` is true."""
    assert found, f"expected {what}" + (f", came {_text(came)}" if str(came) else "")


def finite(arrays: Mapping[str, Any], what: str) -> None:
    """Fail where a number is NaN or infinite, with the name of its array."""
    for name, array in arrays.items():
        bad = np.count_nonzero(~np.isfinite(array))
        assert not bad, f"expected finite numbers in {name} of {what}, {bad} are not"


def zero(arrays: Mapping[str, Any], what: str) -> None:
    """Fail where a number is not 0, with the name of its array."""
    for name, array in arrays.items():
        most = float(np.abs(array).max(initial=0.0))
        assert most == 0, f"expected {name} to be 0 {what}, came up to {most:.3g}"


def moves(arrays: Mapping[str, Any], what: str) -> None:
    """Fail unless some number of every array differs from 0."""
    still = [name for name, array in arrays.items() if not np.any(array)]
    assert not still, f"expected {what}, came zeros alone in {_text(still)}"


def alike(found: Iterable[Any], what: str) -> None:
    """Fail unless all are equal."""
    every = list(found)
    odd = [one for one in every if one != every[0]]
    assert not odd, f"expected {what} to be equal, came {_text(every[0])} and {_text(odd[0])}"


def _text(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
