"""Play one episode of ``environment=tools`` with a policy that says given texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from coupler import Outcome, Request, Task
from coupler.conversation import Codec, Conversation, Limits, TemplateRenderer
from coupler.testing.conversations import Scripted, check_rows
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


class Played:
    """One episode with a policy that says the given texts, the last one again and
    again.
    """

    def __init__(
        self, codec: Codec, says: Sequence[str], task: Task = TASK, **options: Any
    ) -> None:
        texts = iter(says)
        last = says[-1]
        self.codec = codec
        self.environment = ToolEnvironment(ToolsConfig(**options))
        self.rollout = Scripted(lambda _: codec.target_ids(next(texts, last)))
        renderer = TemplateRenderer(codec, tools=self.environment.uses_tools)
        request = Request((), 1, 1.0, seed=7)
        self.conversation = Conversation(
            self.rollout,
            renderer,
            Limits(4096, turns=6, calls=self.environment.config.max_calls),
            request,
        )
        self.outcome: Outcome = asyncio.run(self._play(task))
        self.rows = self.conversation.close()
        check_rows(self.rows, self.rollout.answered)

    async def _play(self, task: Task) -> Outcome:
        await self.environment.setup()
        try:
            async with asyncio.timeout(30):
                return await self.environment.episode(task, self.conversation)
        finally:
            await self.environment.close()

    @property
    def shown(self) -> str:
        """The text of the last prompt."""
        return self.codec.tokenizer.decode(self.rollout.requests[-1].prompt)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
