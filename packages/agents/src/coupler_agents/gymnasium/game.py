"""Step one environment in threads, and show its observations as text."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from gymnasium import Env

Make = Callable[[], Env[Any, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]
RESET = re.compile(r"\x1b\[0?m")
COLOUR = re.compile(r"\x1b\[[\d;]+m")


class Game:
    """An environment of one episode. Its calls follow each other, in threads.

    Args:
        seconds: the most that one call may take.
    """

    def __init__(self, make: Make, threads: ThreadPoolExecutor, seconds: float) -> None:
        self.env: Env[Any, Any] | None = None
        self._make = make
        self._threads = threads
        self._seconds = seconds
        self._last: Future[Any] | None = None

    async def begin(self, seed: int, check: Callable[[Env[Any, Any]], None]) -> str:
        """Make the environment, check it, and return its first observation."""

        def begun() -> str:
            self.env = env = self._make()
            check(env)
            observation, _ = env.reset(seed=seed)
            return _shown(env, observation)

        return await self._run(begun)

    async def step(self, action: Any) -> Step:
        """Take a step. Return what gymnasium does, with the observation as text."""
        env = self.env
        assert env

        def stepped() -> Step:
            observation, reward, terminated, truncated, info = env.step(action)
            return (
                _shown(env, observation),
                float(reward),
                bool(terminated),
                bool(truncated),
                info,
            )

        return await self._run(stepped)

    async def _run(self, call: Callable[[], Any]) -> Any:
        self._last = self._threads.submit(call)
        async with asyncio.timeout(self._seconds):
            return await asyncio.wrap_future(self._last)

    async def close(self) -> None:
        """Close the environment, after the call that still runs."""
        last = self._last
        if last and not last.done():
            last.add_done_callback(lambda _: self._closed())
        elif self.env:
            with suppress(TimeoutError):
                await self._run(self._closed)

    def _closed(self) -> None:
        if self.env:
            with suppress(Exception):  # the episode has its reward
                self.env.close()


def _shown(env: Env[Any, Any], observation: Any) -> str:
    """Return an observation as text: itself, what the environment renders, or JSON."""
    if isinstance(observation, str):
        return observation
    drawn = env.render() if env.render_mode == "ansi" else None
    if isinstance(drawn, str):
        # a colour may say where the player is
        return COLOUR.sub("[", RESET.sub("]", drawn)).strip()
    return json.dumps(_plain(observation))


def _plain(value: Any) -> Any:
    """Return a value of Python and NumPy as JSON has it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
