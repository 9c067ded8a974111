"""Tools that the tests of this folder give to a policy."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def look(at: str, *, secret: str) -> str:
    """Look at a place.

    Args:
        at: The place.
    """
    await asyncio.sleep(0)
    return f"{at}: {secret}"


def fail(why: str) -> str:
    """Fail.

    Args:
        why: The reason.
    """
    raise ValueError(why)


def long(size: int) -> str:
    """Return a long text.

    Args:
        size: Its characters.
    """
    return "x" * size


def sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def length(completion: str) -> float:
    return float(len(completion))


def bare(a, b):  # type: ignore[no-untyped-def]
    return a, b


class Guess:
    """A number to guess, in the convention of TRL."""

    def reset(self, **row: object) -> str:
        self.secret, self.won = int(str(row["answer"])), False
        return " It is between 1 and 9."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: From 1 to 9.
        """
        self.won |= number == self.secret
        return "right" if self.won else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.won)


class Talks:
    """A user who asks for more, twice."""

    released = 0

    def __init__(self) -> None:
        self.asked = 0

    def respond(self, text: str) -> str | None:
        self.asked += 1
        return f"you said {text!r}, go on" if self.asked < 3 else None

    def release(self) -> None:
        type(self).released += 1


class counter:
    """A counter of one episode, which keeps what happened to it in ``log``."""

    log: ClassVar[list[str]] = []

    def reset(self, start: int = 0) -> None:
        self.log.append(f"reset {start}")
        self.value = start

    async def __call__(self, by: int, *, times: int = 1) -> int:
        """Count up, and return the new number.

        Args:
            by: How far.
        """
        await asyncio.sleep(0)
        self.value += by * times
        return self.value

    def get_reward(self, scale: float = 1.0) -> float:
        return self.value * scale

    def release(self, why: str = "") -> None:
        self.log.append(f"release {why}")


class needy:
    """A tool that cannot begin without its row."""

    def reset(self, key: str) -> None:
        self.key = key

    def __call__(self) -> str:
        """Tell the key."""
        return self.key


class broken(counter):
    """A tool that fails at the end."""

    def get_reward(self, scale: float = 1.0) -> float:
        return float("nan")


def python(code: str) -> str:
    """Run nothing, under the name of another tool.

    Args:
        code: Some text.
    """
    return code


def by_program(completion: str, answer: str) -> float:
    """Score a program by what it prints."""
    from coupler_agents.sandbox import run_python

    return float(run_python(completion).stdout.strip() == answer)
