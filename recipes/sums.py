"""Conversations that keep a running sum, for supervised training."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

TURNS = 3


def rows(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``size`` conversations of three turns each."""
    random = Random(seed)
    for _ in range(size):
        total, messages = 0, list[dict[str, str]]()
        for turn in range(TURNS):
            number = random.randint(1, 9)
            total += number
            asked = f"Start at {number}." if turn == 0 else f"Add {number}."
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": f"The sum is now {total}."},
            ]
        yield {"messages": messages}
