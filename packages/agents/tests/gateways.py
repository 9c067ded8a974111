"""What the tests of the gateway share: a model that calls tools, a scripted policy, and
an episode behind a gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
from transformers import PreTrainedTokenizerFast

from coupler.conversation import Codec, Conversation, Limits, Row, TemplateRenderer
from coupler.interfaces import Model, Request
from coupler.testing.conversations import Scripted
from coupler.testing.models import write_tokenizer
from coupler_agents.gateway import Bounds, Gateway, Session

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>"
    "\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<result>"
    "{{ m.content }}</result><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{% if "
    "m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}"
    "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
}
LOOK = {"name": "look", "description": "Look at a place.", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "%s", "far": [1.5, null]}}\n</tool_call>'
ANSWERS = (
    "<think>\nhm\n</think>\n\nso\n" + CALL % "a" + "\n" + CALL % "b",
    CALL % "\\u00e9 中",
    "the answer is 3 .",
    "é 🙂",
)
RESULTS = (("a door", "a wall"), ("nothing",))
MAX_SECONDS = 60.0


@cache
def codec() -> Codec:
    folder = Path(mkdtemp())
    write_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return Codec(Model(str(folder)))


@cache
def renderer() -> TemplateRenderer:
    return TemplateRenderer(codec(), tools=True)


def said(text: str) -> tuple[int, ...]:
    return codec().target_ids(text, control_tokens=True)


def talk(*texts: str, **limits: Any) -> tuple[Conversation, Scripted]:
    """A conversation whose policy says these texts, the last one for ever."""
    left = [said(text) for text in texts]
    rollout = Scripted(lambda _: left.pop(0) if len(left) > 1 else left[0])
    bounds = Limits(**{"completion_tokens": 512, **limits})
    return Conversation(rollout, renderer(), bounds, Request((), 1, seed=5)), rollout


@asynccontextmanager
async def serving(bounds: Bounds | None = None) -> Any:
    gateway = Gateway(bounds)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


def run(episode: Coroutine[Any, Any, Any]) -> Any:
    """Run an episode, for a bounded time."""

    async def bounded() -> Any:
        async with asyncio.timeout(MAX_SECONDS):
            return await episode

    return asyncio.run(bounded())


def recorded(
    play: Callable[[Session], Coroutine[Any, Any, None]], *texts: str, **limits: Any
) -> tuple[tuple[Row, ...], Conversation]:
    """The rows of an episode that a client plays through the gateway."""
    conversation, _ = talk(*(texts or ANSWERS), **limits)

    async def episode() -> None:
        async with serving() as gateway:
            await play(gateway.open(conversation))

    run(episode())
    return conversation.close(), conversation


def client_of(session: Session) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=session.url,
        headers={"Authorization": f"Bearer {session.api_key}"},
        timeout=20.0,
    )


async def still_works(session: Session) -> None:
    async with client_of(session) as client:
        answer = await client.post(
            "/v1/chat/completions",
            json={"model": "policy", "messages": [{"role": "user", "content": "a"}]},
        )
    assert answer.status_code == 200, answer.text


def check_error(answer: httpx.Response, path: str) -> str:
    """The sentence of an error, in the shape of its dialect."""
    held = answer.json()
    assert (held.get("type") == "error") == path.startswith("/v1/messages"), held
    sentence = held["error"]["message"]
    assert sentence.strip() and "\n" not in sentence and "Traceback" not in sentence
    return sentence


async def raw(session: Session, *parts: bytes, pause: float = 0.0) -> bytes:
    """Write parts to a connection, and return what came until it was closed."""
    host, port = session.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()
