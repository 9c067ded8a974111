"""The gateway with a rollout that samples: the toy backend of core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from gateways import renderer, run, serving

from coupler.conversation import Conversation, Limits
from coupler.interfaces import Completion, Model, Rank, Request
from coupler.testing.conversations import check_rows
from coupler.testing.models import EOS, read_toy, write_toy
from coupler.testing.toy import ToyRollout
from coupler.testing.toy_config import ToyRolloutConfig

VERSION = 3
TURNS = 12


class Kept(ToyRollout):
    """The toy rollout, which keeps what it answered. It ends turns soon."""

    async def start(self, folder: Path) -> None:
        await self.setup(Rank())
        self.weights = read_toy(folder)
        self.weights["head.bias"][EOS] += 4.0
        self.version = VERSION
        self.answered: list[tuple[Request, Completion]] = []

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        self.answered.append((request, done))
        return done


def test_sampled_turns_are_recorded(tmp_path: Path) -> None:
    rollout = Kept(ToyRolloutConfig(), Model(str(write_toy(tmp_path))))
    limits = Limits(completion_tokens=400, turns=TURNS)
    conversation = Conversation(rollout, renderer(), limits, Request((), 1, seed=11))

    async def episode() -> None:
        await rollout.start(tmp_path)
        async with serving() as gateway:
            session = gateway.open(conversation)
            history: list[Any] = [{"role": "user", "content": "what is 1 + 2 ?"}]
            async with openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, max_retries=0
            ) as client:
                for _ in range(TURNS):
                    made = await client.chat.completions.create(model="policy", messages=history)
                    history.append(made.choices[0].message.model_dump(exclude_none=True))
                    history.append({"role": "user", "content": "go on"})
                with pytest.raises(openai.BadRequestError, match=r"ended \(reason: turns\)"):
                    await client.chat.completions.create(model="policy", messages=history)

    run(episode())
    rows = conversation.close()
    check_rows(rows, rollout.answered)
    assert len(rollout.answered) == TURNS and len(rows) == 1 and not conversation.forks
    versions = {v for s in rows[0].trajectory.segments for v in s.versions}
    assert versions == {VERSION}
    assert len({done.tokens for _, done in rollout.answered}) > 1
