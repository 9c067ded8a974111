"""The quickstart's problems: sums of three digits from reasoning-gym, with no held-out problem among the others."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

from coupler.data.reasoning_gym import rows

TASK = {"task": "chain_sum", "min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
HELD_OUT_SHARE = 0.1  # of all problems, chosen by a hash of the problem's text
WRONG_SHARE = 0.4  # of the demonstrations: what imitation cannot get rid of, and a verifier can


def problems(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Distinct problems to train on, out of ``size`` generated ones."""
    return (row for row in _distinct(size, seed) if not _held_out(row))


def held_out(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Distinct problems that the others never yield, out of ``size`` generated ones."""
    return (row for row in _distinct(size, seed) if _held_out(row))


def demonstrations(size: int, seed: int, copies: int = 4) -> Iterator[dict[str, Any]]:
    """Every problem ``copies`` times with an answer to imitate; a share of the answers is off by a few, at random."""
    chance = random.Random(seed)
    for row in problems(size, seed):
        for _ in range(copies):
            off = chance.choice((-3, -2, -1, 1, 2, 3)) if chance.random() < WRONG_SHARE else 0
            yield {**row, "answer": str(int(row["answer"]) + off)}


def _distinct(size: int, seed: int) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for row in rows(size=size, seed=seed, **TASK):
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            yield row


def _held_out(row: dict[str, Any]) -> bool:
    return zlib.crc32(row["prompt"].encode()) % 1000 < 1000 * HELD_OUT_SHARE
