"""A text environment in the gymnasium API, for the conformance kit and the tests."""

from __future__ import annotations

import string
import time
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

MAX_STEPS = 4


class Guess(gymnasium.Env[str, str]):
    """A number to guess, in words."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    made = 0
    closed: ClassVar[set[int]] = set()

    def __init__(self, largest: int = 9, step_seconds: float = 0.0, fails: bool = False) -> None:
        type(self).made += 1
        self.number = self.made
        letters = string.ascii_letters + string.digits + " "
        self.action_space = spaces.Text(max_length=20, charset=letters)
        self.observation_space = spaces.Text(max_length=100, charset=string.printable)
        self.largest, self.step_seconds, self.fails = largest, step_seconds, fails

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(1, self.largest + 1))
        self.steps = 0
        return f"It is between 1 and {self.largest}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.step_seconds)
        if self.fails:
            raise RuntimeError("the game is broken")
        self.steps += 1
        won = action == str(self.secret)
        info = {"won": won, "steps": self.steps, "secret": str(self.secret) + "!"}
        late = self.steps == MAX_STEPS and not won
        return ("right" if won else f"not {action}"), 1.0 if won else -0.25, won, late, info

    def close(self) -> None:
        self.closed.add(self.number)


class Box(gymnasium.Env[Any, Any]):
    """An environment in which nothing can be said."""

    action_space = spaces.Box(0.0, 1.0)
    observation_space = spaces.Box(0.0, 1.0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}


if "KitGuess-v0" not in gymnasium.registry:
    gymnasium.register("KitGuess-v0", Guess)
