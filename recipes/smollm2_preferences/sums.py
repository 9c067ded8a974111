"""Sums of reasoning-gym for three stages: answers, pairs, and a verifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coupler.data.reasoning_gym import rows

# A wrong sum of a pair is off by one of these.
SLIPS = (1, -1, 10, -10, 2, -2)


def sums(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield sums and differences of two numbers with their answers."""
    yield from rows("chain_sum", size, seed, min_terms=2, max_terms=2, min_digits=1, max_digits=2)


def pairs(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the same rows with the right answer and one that is nearly right."""
    for index, row in enumerate(sums(size, seed)):
        wrong = int(row["answer"]) + SLIPS[index % len(SLIPS)]
        yield {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(wrong)}
