"""The quickstart's problems: words of reasoning-gym to spell backward; no held-out word
is among those to train on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from coupler.data.reasoning_gym import rows

HELD_OUT_SHARE = 0.03  # of all words, chosen by a hash of the problem's text


def problems(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Distinct problems to train on, out of ``size`` generated ones."""
    return (row for row in _distinct(size, seed) if not _held_out(row))


def held_out(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Distinct problems that :func:`problems` never yields, out of ``size`` generated
    ones.
    """
    return (row for row in _distinct(size, seed) if _held_out(row))


@lru_cache(1)
def _distinct(size: int, seed: int) -> list[dict[str, Any]]:
    """Generate them once for all stages of a process."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows("spell_backward", size, seed, min_word_len=4, max_word_len=7):
        first.setdefault(row["prompt"], row)
    return [*first.values()]


def _held_out(row: dict[str, Any]) -> bool:
    return zlib.crc32(row["prompt"].encode()) % 1000 < 1000 * HELD_OUT_SHARE
