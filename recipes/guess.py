"""A game of several turns: guess a number, and hear whether it is higher or lower."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

RULES = (
    "I think of a number between 1 and {high}. Guess it. Answer with one number. After each "
    "guess I say higher or lower."
)


class Guess:
    """One episode, for ``environment.target``. A secret that is found earns 1."""

    def reset(self, **row: object) -> None:
        self.secret, self.won = int(str(row["answer"])), False

    def respond(self, text: str) -> str | None:
        """Return the answer to a guess, or None where the game has ended."""
        found = re.search(r"\d+", text)
        if not found:
            return "Say one number."
        self.won = int(found.group()) == self.secret
        return None if self.won else "higher" if int(found.group()) < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.won)


def rows(size: int, seed: int, high: int = 8) -> Iterator[dict[str, str]]:
    """Yield ``size`` games with secrets from 1 to ``high``."""
    random = Random(seed)
    for _ in range(size):
        yield {"prompt": RULES.format(high=high), "answer": str(random.randint(1, high))}
