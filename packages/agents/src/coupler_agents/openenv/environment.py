"""Let the policy act in an environment behind a server of OpenEnv."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from importlib import import_module
from typing import Any

from coupler import CouplerError, Environment, Message, Outcome, Policy, Task
from coupler.conversation import ConversationOver
from coupler_agents.beginning import kwargs_of, with_observation
from coupler_agents.openenv.config import OpenEnvConfig
from coupler_agents.pattern import ActionPattern, NoAction

COLUMN = "reset_kwargs"
REFUSED = "(code: VALIDATION_ERROR)"
SHOWN = 500  # characters of why the server refuses an action


class OpenEnvEnvironment(Environment):
    """Episodes in which the policy sees observations, and says actions.

    Each episode has a session of its own with the server. The first observation is put
    behind the prompt, and each later one is the user's message.
    """

    config: OpenEnvConfig

    def __init__(self, config: OpenEnvConfig) -> None:
        super().__init__(config)
        if not config.url:
            raise CouplerError(
                "environment=openenv needs a server.\n  set:  environment.url=http://HOST:PORT"
            )
        self.pattern = ActionPattern(config.action_pattern)
        self.library = _library()

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode, until the server or a limit ends it."""
        client = self.library.GenericEnvClient(
            base_url=self.config.url,
            connect_timeout_s=self.config.step_timeout_s,
            message_timeout_s=self.config.step_timeout_s,
        )
        rewards: list[float] = []

        async with client:
            result = await client.reset(seed=task.seed, **kwargs_of(task.row, COLUMN))
            messages = with_observation(task.messages, self._shown(result))
            # A limit ends the episode, and what happened until then has a reward.
            with suppress(ConversationOver):
                await self._play(
                    messages,
                    policy,
                    client,
                    rewards,
                )

        return Outcome(sum(rewards), turn_rewards=tuple(rewards))

    async def _play(
        self, messages: list[Message], policy: Policy, client: Any, rewards: list[float]
    ) -> None:
        """Let the policy act until an end.

        Raises:
            ConversationOver: a limit was reached.
        """
        while True:
            reply = await policy.chat(messages)
            try:
                result = await self._step(client, reply.message.get("content") or "")
            except NoAction as wrong:
                rewards.append(self.config.invalid_reward)
                seen, done = str(wrong), False
            else:
                rewards.append(_reward(result))
                seen, done = self._shown(result), result.done

            if reply.ended or done:
                return
            messages += [reply.message, {"role": "user", "content": seen}]

    async def _step(self, client: Any, said: str) -> Any:
        """Send an action.

        Raises:
            NoAction: there is none, or the server does not take it.
        """
        action = self._action(self.pattern.find(said))
        try:
            return await client.step(action)
        except RuntimeError as error:  # of the library, for each answer that is an error
            if REFUSED not in str(error):
                raise
            raise NoAction(f"The action is not valid: {error}"[:SHOWN]) from None

    def _action(self, said: str) -> dict[str, Any]:
        if self.config.action_field:
            return {self.config.action_field: said}
        try:
            action = json.loads(said)
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise NoAction("An action is a JSON object.")
        return action

    def _shown(self, result: Any) -> str:
        """Return an observation as text.

        Raises:
            CouplerError: it has no such field.
        """
        observation, name = result.observation, self.config.observation_field
        if not name:
            return json.dumps(observation)
        if name not in observation:
            raise CouplerError(
                f"environment.observation_field={name} is no field of an observation.\n"
                f"  there are:  {', '.join(observation)}"
            )
        value = observation[name]
        return value if isinstance(value, str) else json.dumps(value)


def _library() -> Any:
    try:
        return import_module("openenv.core")
    except ImportError as error:
        raise CouplerError(
            f"environment=openenv needs the openenv library: {error}\n"
            "  install:  pip install 'openenv>=0.10'"
        ) from None


def _reward(result: Any) -> float:
    """Return the reward of a step, 0 where the server gives none.

    Raises:
        CouplerError: it is not finite.
    """
    reward = 0.0 if result.reward is None else float(result.reward)
    if not math.isfinite(reward):
        raise CouplerError(f"environment=openenv: a step has the reward {reward}.")
    return reward
