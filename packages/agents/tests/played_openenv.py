"""A server of OpenEnv with a number to guess."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Guess(Environment[Said, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, largest: int = 4, **more: Any) -> Seen:
        self.secret = str(random.Random(seed).randint(1, largest))
        self.steps = 0
        return Seen(text=f"It is between 1 and {largest}.", done=False, reward=None)

    def step(self, action: Said, timeout_s: float | None = None, **more: Any) -> Seen:
        if action.message == "break":
            raise RuntimeError("the game is broken")
        self.steps += 1
        won = action.message == self.secret
        text = "right" if won else f"not {action.message}"
        return Seen(text=text, done=won or self.steps == 4, reward=1.0 if won else -0.25)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_fastapi_app(Guess, Said, Seen, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
