"""``environment=played``: episodes for the tests of environments, and a toy rollout
that keeps what it sampled.

A run of the tests plays in this process, so that the lists of this module hold what
happened.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coupler import (
    Backend,
    Completion,
    Environment,
    EnvironmentConfig,
    Message,
    Outcome,
    Policy,
    Request,
    Task,
    hookimpl,
)
from coupler.conversation import ConversationOver
from coupler.interfaces import no_effect
from coupler.testing.toy import ToyRollout
from coupler.testing.toy_config import BACKENDS, ToyRolloutConfig

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


@dataclass
class PlayedConfig(EnvironmentConfig):
    name: str = "played"
    how: str = "talk"
    turns: int = 3
    """The turns of an episode that no limit ends."""
    fails: int = 0
    """How often a chosen episode raises before it goes well."""
    tools: bool = False
    ignored: int = 0
    """Nothing reads it."""
    dies_at: int = no_effect(0)
    """The episode at which the process dies."""
    kills: str = no_effect("")
    """A folder with a file for each episode that killed its process. Those do of every
    third seed, once, before a turn or behind the last. Every fourth process is killed
    while it starts. Its subfolder ``processes`` has a file for each that started."""
    holds: str = no_effect("")
    """A folder with a file for each episode under way, by ``how=lingers``."""


@dataclass
class Seen:
    """What happened in the runs since the last ``clear``."""

    begun: list[tuple[str, int]] = field(default_factory=list)
    # sampled turns that the environment was given
    turns: list[str] = field(default_factory=list)
    sampled: list[tuple[Request, Completion]] = field(default_factory=list)
    open: int = 0

    def clear(self) -> None:
        self.begun, self.turns, self.sampled, self.open = [], [], [], 0


SEEN = Seen()


class Played(Environment):
    """Plays as ``how`` says."""

    config: PlayedConfig

    def __init__(self, config: PlayedConfig) -> None:
        super().__init__(config)
        self.uses_tools = config.tools

    async def setup(self) -> None:
        """Begin to count."""
        self.tries: Counter[int] = Counter()
        SEEN.open += 1
        if self.config.kills:
            self._maybe_die_at_start()

    async def close(self) -> None:
        """Stop."""
        SEEN.open -= 1

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode."""
        if self.config.dies_at and len(SEEN.begun) == self.config.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        SEEN.begun.append((str(task.row["prompt"]), task.seed))
        said = await self._turns(task, policy)
        self._maybe_die(task.seed, len(said))
        reward = sum(map(len, said)) / 100 + len(said)
        return await getattr(self, f"_{self.config.how}")(task, policy, said, reward)

    async def _turns(self, task: Task, policy: Policy) -> list[str]:
        history: list[Message] = list(task.messages)
        said: list[str] = []
        for turn in range(self.config.turns):
            self._maybe_die(task.seed, turn)
            reply = await policy.chat(history, [LOOK] if self.config.tools else ())
            said.append(str(reply.message["content"]))
            SEEN.turns.append(said[-1])
            if reply.ended:
                break
            history += [reply.message, {"role": "user", "content": f"{turn} ?"}]
        return said

    def _maybe_die_at_start(self) -> None:
        begun = Path(self.config.kills, "processes")
        begun.mkdir(exist_ok=True)
        mark = begun / str(os.getpid())
        mark.touch()
        if len(list(begun.iterdir())) % 4 == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _maybe_die(self, seed: int, turn: int) -> None:
        if not self.config.kills or seed % 3 or seed // 3 % 3 != turn:
            return
        mark = Path(self.config.kills, str(seed))
        if not mark.exists():
            mark.write_text(f"before turn {turn}")
            os.kill(os.getpid(), signal.SIGKILL)

    async def _talk(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        return Outcome(reward, metrics={"said": float(len(said))})

    async def _scored(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        return Outcome()

    async def _raises(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        self.tries[task.seed] += 1
        if task.seed % 3 == 0 and self.tries[task.seed] <= self.config.fails:
            raise RuntimeError(f"the game broke, try {self.tries[task.seed]}")
        return Outcome(reward)

    async def _lingers(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        """Raise as :meth:`_raises` does, while other seeds hold what they give back
        late.
        """
        if task.seed % 3 == 0:
            return await self._raises(task, policy, said, reward)
        held = Path(self.config.holds, str(task.seed))
        if held.exists():
            Path(self.config.holds, "twice").touch()
        held.touch()
        try:
            await asyncio.sleep(0.3)
        finally:
            await asyncio.sleep(0.3)
            held.unlink(missing_ok=True)
        return Outcome(reward)

    async def _cancels(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        self.tries[task.seed] += 1
        if self.tries[task.seed] <= self.config.fails:
            inner = asyncio.ensure_future(asyncio.sleep(10))
            inner.cancel()
            await inner
        return Outcome(reward)

    async def _exits(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        self.tries[task.seed] += 1
        if self.tries[task.seed] <= self.config.fails:
            sys.exit(0)
        return Outcome(reward)

    async def _hangs(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        await asyncio.sleep(100)
        raise AssertionError("the limit did not come")

    async def _hides(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        try:
            await policy.chat([{"role": "user", "content": "once more"}])
        except Exception:
            return Outcome(0.0)
        return Outcome(reward)

    async def _insists(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        while True:
            with suppress(ConversationOver):
                await policy.chat(task.messages)

    async def _invalid(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        return Outcome(reward, invalid="a draw" if task.seed % 4 == 0 else "")

    async def _per_turn(
        self, task: Task, policy: Policy, said: list[str], reward: float
    ) -> Outcome:
        return Outcome(reward, turn_rewards=tuple(1.0 + turn for turn in range(len(said))))

    async def _one_less(
        self, task: Task, policy: Policy, said: list[str], reward: float
    ) -> Outcome:
        return Outcome(reward, turn_rewards=(1.0,) * (len(said) - 1))

    async def _no_number(
        self, task: Task, policy: Policy, said: list[str], reward: float
    ) -> Outcome:
        return Outcome(reward, turn_rewards=(float("nan"),) * len(said))

    async def _nothing(self, task: Task, policy: Policy, said: list[str], reward: float) -> Any:
        return None

    async def _forks(self, task: Task, policy: Policy, said: list[str], reward: float) -> Outcome:
        await policy.chat([{"role": "user", "content": "another game"}])
        SEEN.turns.append("")
        return Outcome(reward)


@dataclass
class KeptConfig(ToyRolloutConfig):
    name: str = "kept"
    fails_after: int = 1_000_000
    """The request of an episode that fails, and all behind it."""


class KeptRollout(ToyRollout):
    """Samples as the toy does."""

    config: KeptConfig

    async def generate(self, request: Request) -> Completion:
        """Sample, and keep it."""
        if len(SEEN.sampled) >= self.config.fails_after:
            raise RuntimeError("the rollout broke")
        done = await super().generate(request)
        SEEN.sampled.append((request, done))
        return done


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind="environment",
        name="played",
        target=f"{__name__}:Played",
        config=PlayedConfig,
    )
    (toy,) = (backend for backend in BACKENDS if backend.kind == "rollout")
    assert not callable(toy.capabilities)
    yield Backend(
        kind="rollout",
        name="kept",
        target=f"{__name__}:KeptRollout",
        config=KeptConfig,
        capabilities=toy.capabilities,
    )
