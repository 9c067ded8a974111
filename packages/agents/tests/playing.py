"""Play one episode of ``environment=tools`` with a policy that says given texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from coupler import Environment, Outcome, Request, Task
from coupler.conversation import Codec, Conversation, Limits, TemplateRenderer
from coupler.testing.conversations import Scripted, check_rows
from coupler.testing.environments import set_up
from coupler_agents.tools.config import ToolsConfig
from coupler_agents.tools.environment import ToolEnvironment

TOOLS = "played_tools"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n"
    "<result>{{ m.content }}</result><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}"
    "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TASK = Task(({"role": "user", "content": "what is 1 + 2 ?"},), {"answer": "3", "index": 0}, 7)


class Talk:
    """A conversation with a policy that says the given texts, the last one again and
    again.
    """

    def __init__(self, codec: Codec, says: Sequence[str], environment: Environment) -> None:
        texts = iter(says)
        last = says[-1]
        self.codec = codec
        self.environment = environment
        self.rollout = Scripted(lambda _: codec.target_ids(next(texts, last)))
        renderer = TemplateRenderer(codec, tools=environment.uses_tools)
        limits = Limits(4096, turns=6, calls=environment.config.max_calls)
        self.conversation = Conversation(
            self.rollout, renderer, limits, Request((), 1, 1.0, seed=7)
        )

    async def play(self, task: Task = TASK) -> Outcome:
        """Play the episode in an environment that is set up."""
        async with asyncio.timeout(120):
            return await self.environment.episode(task, self.conversation)

    @property
    def shown(self) -> str:
        """The text of the last prompt."""
        return self.prompt(-1)

    def prompt(self, turn: int) -> str:
        """The text of the prompt of a turn."""
        return self.codec.tokenizer.decode(self.rollout.requests[turn].prompt)


class Played(Talk):
    """One episode of an environment of its own."""

    def __init__(
        self, codec: Codec, says: Sequence[str], task: Task = TASK, **options: Any
    ) -> None:
        super().__init__(codec, says, ToolEnvironment(ToolsConfig(**options)))
        self.outcome: Outcome = asyncio.run(self._whole(task))
        self.rows = self.conversation.close()
        check_rows(self.rows, self.rollout.answered)

    async def _whole(self, task: Task) -> Outcome:
        async with set_up(self.environment):
            return await self.play(task)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
