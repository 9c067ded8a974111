"""The quickstart's problems: sums of three digits from reasoning-gym, split so that no held-out problem is trained on."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from coupler.data.reasoning_gym import rows

TASK = {"task": "chain_sum", "min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
HELD_OUT_SHARE = 0.1  # of all problems, chosen by a hash of the problem's text


def train(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Distinct problems to train on, out of ``size`` generated ones."""
    return (row for row in _distinct(size, seed) if not _held_out(row))


def held_out(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Distinct problems that :func:`train` never yields, out of ``size`` generated ones."""
    return (row for row in _distinct(size, seed) if _held_out(row))


def _distinct(size: int, seed: int) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for row in rows(size=size, seed=seed, **TASK):
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            yield row


def _held_out(row: dict[str, Any]) -> bool:
    return zlib.crc32(row["prompt"].encode()) % 1000 < 1000 * HELD_OUT_SHARE
