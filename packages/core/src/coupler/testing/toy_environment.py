"""Implement a small environment, ``environment=toy``: guess a number in a few turns."""

from __future__ import annotations

from dataclasses import dataclass

from coupler.interfaces import (
    Environment,
    EnvironmentConfig,
    Message,
    Outcome,
    Policy,
    Task,
)
from coupler.system.seeding import stream


@dataclass
class ToyEnvironmentConfig(EnvironmentConfig):
    name: str = "toy"
    max_turns: int = 4
    largest: int = 9
    """The largest number that may have to be guessed."""


class ToyEnvironment(Environment):
    """Thinks of a number from 1 on, and says whether each guess is too low."""

    config: ToyEnvironmentConfig

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play until the number was said, or a limit comes."""
        secret = int(stream(task.seed, "secret").integers(1, self.config.largest + 1))
        history: list[Message] = list(task.messages)
        guesses: list[float] = []

        while True:
            reply = await policy.chat(history)
            said = str(reply.message["content"]).strip()
            guess = int(said[:9]) if said.isascii() and said.isdigit() else 0
            guesses.append(float(guess == secret))
            if reply.ended or guess == secret:
                break
            hint = "more" if guess < secret else "less"
            history += [reply.message, {"role": "user", "content": f"{hint} than {guess}"}]

        return Outcome(
            guesses[-1],
            metrics={"guesses": float(len(guesses))},
            turn_rewards=tuple(guesses),
        )
