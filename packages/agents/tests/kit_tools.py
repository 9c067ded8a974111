"""Tools for the conformance kit: a function, a coroutine, and the class of a game."""

from __future__ import annotations

import asyncio


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait a little.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(min(abs(seconds), 0.01))
    return "done"


class Guess:
    """A game of one episode."""

    def reset(self, *, answer: str = "3", **row: object) -> str:
        """Begin to play."""
        self.secret, self.won = answer, False
        return f" It has {len(answer)} characters."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: between 1 and 100.
        """
        self.won |= str(number) == self.secret
        return "correct" if self.won else "wrong"

    def respond(self, text: str) -> str | None:
        """Answer a turn without calls."""
        return None if self.won or len(text) > 100 else "Go on."

    def get_reward(self) -> float:
        """Return the reward."""
        return float(self.won)
