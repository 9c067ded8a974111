"""Let the policy act in an environment of the gymnasium API."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from coupler import (
    CouplerError,
    Environment,
    Message,
    Outcome,
    Policy,
    Task,
    import_target,
)
from coupler.conversation import ConversationOver
from coupler_agents.beginning import kwargs_of, with_observation
from coupler_agents.gymnasium.config import GymnasiumConfig
from coupler_agents.pattern import NoAction

COLUMN = "env_kwargs"


class GymnasiumEnvironment(Environment):
    """Episodes in which the policy sees observations, and says actions.

    The first observation is put behind the prompt, and each later one is the user's
    message. A turn without an action is answered with what an action is, and the
    environment takes no step.
    """

    config: GymnasiumConfig

    def __init__(self, config: GymnasiumConfig) -> None:
        super().__init__(config)
        if bool(config.id) == bool(config.target):
            raise CouplerError(
                "environment=gymnasium needs one environment.\n"
                "  set:  environment.id=NAME-v0 or environment.target=FILE.py:NAME"
            )
        _check_library()
        from coupler_agents.gymnasium.actions import Reader

        self.reader = Reader(config.action_pattern, config.actions)
        self.made = _target(config.target) if config.target else _registered(config.id)

    async def setup(self) -> None:
        """Start the threads in which environments are stepped."""
        self.threads = ThreadPoolExecutor(self.config.max_threads, "gymnasium")

    async def close(self) -> None:
        """Leave the threads. A step that is still running is not waited for."""
        if hasattr(self, "threads"):
            self.threads.shutdown(wait=False, cancel_futures=True)

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode, until the environment or a limit ends it."""
        from coupler_agents.gymnasium.game import Game

        kwargs = {**self.config.kwargs, **kwargs_of(task.row, COLUMN)}
        game = Game(
            partial(self.made, **kwargs),
            self.threads,
            self.config.step_timeout_s,
        )
        score = Score(self.config)

        try:
            seen = await game.begin(task.seed, self.reader.check)
            # A limit ends the episode, and what happened until then has a reward.
            with suppress(ConversationOver):
                await self._play(
                    with_observation(task.messages, seen),
                    policy,
                    game,
                    score,
                )
        finally:
            await game.close()
        return score.outcome()

    async def _play(self, messages: list[Message], policy: Policy, game: Any, score: Score) -> None:
        """Let the policy act until an end.

        Raises:
            ConversationOver: a limit was reached.
        """
        while True:
            reply = await policy.chat(messages)

            try:
                said = reply.message.get("content") or ""
                action = self.reader.read(said, game.env.action_space)
            except NoAction as wrong:
                score.without_action()
                seen = str(wrong)
            else:
                seen, *result = await game.step(action)
                score.step(*result)
            if reply.ended or score.terminated or score.truncated:
                return
            messages += [reply.message, {"role": "user", "content": seen}]


class Score:
    """Adds up the steps of an episode."""

    def __init__(self, config: GymnasiumConfig) -> None:
        self.config = config
        self.rewards: list[float] = []
        self.terminated = self.truncated = False
        self.invalid = 0
        self.info: Mapping[str, Any] = {}

    def without_action(self) -> None:
        """Count a turn in which the policy did not act."""
        self.rewards.append(self.config.invalid_reward)
        self.invalid += 1

    def step(
        self, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> None:
        """Count a step.

        Raises:
            CouplerError: its reward is not finite.
        """
        if not math.isfinite(reward):
            raise CouplerError(f"environment=gymnasium: a step has the reward {reward}.")
        self.rewards.append(reward)
        self.terminated = terminated
        self.truncated = truncated
        self.info = info

    def outcome(self) -> Outcome:
        """Return the sum of the rewards, and the reward of each turn."""
        metrics = {
            "invalid_actions": float(self.invalid),
            "terminated": float(self.terminated),
            "truncated": float(self.truncated),
        }

        for name in self.config.info_metrics:
            # numbers of NumPy are numbers too
            with suppress(TypeError, ValueError):
                value = float(self.info[name]) if name in self.info else math.nan
                if math.isfinite(value):
                    metrics[f"info_{name}"] = value

        return Outcome(
            sum(self.rewards),
            metrics=metrics,
            turn_rewards=tuple(self.rewards),
        )


def _check_library() -> None:
    try:
        import gymnasium  # noqa: F401
    except ImportError:
        raise CouplerError(
            "environment=gymnasium needs the gymnasium library.\n"
            "  install:  pip install 'coupler-agents[gymnasium]'"
        ) from None


def _registered(name: str) -> Callable[..., Any]:
    import gymnasium

    module, colon, _ = name.partition(":")
    try:
        if colon:
            import_module(module)
        gymnasium.spec(name.rpartition(":")[2])
    except (gymnasium.error.Error, ImportError) as error:
        raise CouplerError(f"environment.id={name} cannot be made: {error}") from None
    return partial(gymnasium.make, name)


def _target(target: str) -> Callable[..., Any]:
    found = import_target(target)
    if not callable(found):
        raise CouplerError(f"environment.target={target} is no class and no function.")
    return found
