"""Check conversations: a renderer against its own full rendering, and the recorder
under a caller that does what callers do.

A third party calls :func:`check_renderer` and :func:`check_recording` from a test of
its own, with its :class:`~coupler.conversation.Renderer`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from random import Random
from typing import Any

from coupler.batch.trajectory import Origin
from coupler.conversation import (
    Conversation,
    ConversationOver,
    Limits,
    Message,
    Renderer,
    Row,
)
from coupler.interfaces import Completion, Request

SAYINGS = ("what is 1 + 2 ?", "go on", "é 中 🙂", " two  blanks \n", "<|im_end|> </s> <eos>", "")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
ROUNDS = 8  # requests of a random episode


@dataclass
class Scripted:
    """A rollout that samples what a function says, and keeps what it was asked.

    Every sampled token has a log-prob of its own, by which it is found again.

    Args:
        says: returns the sampled ids of a request.
        pause: seconds until an answer, in which a caller may go away.
    """

    says: Callable[[Request], tuple[int, ...]]
    pause: float = 0.0
    finish: Any = "stop"
    requests: list[Request] = field(default_factory=list)
    answered: list[tuple[Request, Completion]] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: count(1))

    async def generate(self, request: Request) -> Completion:
        """Sample what the script says."""
        self.requests.append(request)
        await asyncio.sleep(self.pause)

        ids = self.says(request)[: request.max_tokens]
        logprobs = tuple(-float(next(self.numbers)) for _ in ids)
        done = Completion(
            ids,
            logprobs,
            (0,) * len(ids),
            self.finish,
        )
        self.answered.append((request, done))
        return done


def check_rows(rows: Sequence[Row], answered: Sequence[tuple[Request, Completion]]) -> None:
    """Check that rows reproduce every request, and train each sampled token once."""
    fed = [tuple(i for s in row.trajectory.segments for i in s.ids) for row in rows]
    for request, done in answered:
        whole = request.prompt + done.tokens
        assert any(ids[: len(whole)] == whole for ids in fed), "a request is in no row"

    trained: list[tuple[int, float]] = []
    for row in rows:
        for segment in row.trajectory.segments:
            if segment.origin is Origin.SAMPLED:
                trained += zip(segment.ids, segment.logprobs, strict=True)
    sampled = [
        pair for _, done in answered for pair in zip(done.tokens, done.logprobs, strict=True)
    ]
    assert sorted(trained) == sorted(sampled), "a sampled token is not trained exactly once"


def check_renderer(renderer: Renderer, *, tools: bool = False, system: bool = True) -> int:
    """Compare every extension with the end of the full rendering.

    Args:
        tools: whether to append results of tool calls too.
        system: whether histories may begin with a system prompt.

    Returns:
        The number of extensions that were compared. The others were refused.
    """
    compared = 0
    offered: list[Any] = [TOOL] if tools else []
    for history, text in product(_histories(tools, system), SAYINGS[:-1]):
        calls = history[-1].get("tool_calls", [])
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": "look",
                "content": f"{text}{i}",
            }
            for i, call in enumerate(calls)
        ]

        for new in (results, [*results, {"role": "user", "content": text}]):
            compared += bool(new) and _same(renderer, history, new, offered)
    return compared


def _same(
    renderer: Renderer,
    history: list[dict[str, Any]],
    new: list[dict[str, Any]],
    offered: list[Any],
) -> bool:
    """Compare one extension, and return whether the renderer gave one."""
    found = False
    for stop in renderer.stop:
        segments = renderer.extend(history, (stop,), new, offered)

        if segments is not None:
            found = True
            ids = tuple(i for segment in segments for i in segment.ids)
            full = renderer.render([*history, *new], offered)
            assert full[-len(ids) - 1 :] == (stop, *ids), f"{history} {new}"
    return found


def _histories(tools: bool, system: bool) -> list[list[dict[str, Any]]]:
    """Return histories that end with an answer, of which some have reasoning and
    calls.
    """
    user: dict[str, Any] = {"role": "user", "content": "what is 1 + 2 ?"}
    said: dict[str, Any] = {"role": "assistant", "content": "3"}
    thought = {**said, "reasoning_content": "1 + 2"}
    plain = [
        [user, said],
        [user, thought],
        [user, thought, user, said],
        [user, said, user, thought],
    ]
    if system:
        plain.append([{"role": "system", "content": "be brief"}, user, said])
    if not tools:
        return plain

    calls = [_call(f"call{i:05}", {"at": f"place {i}"}) for i in range(2)]
    result = {
        "role": "tool",
        "tool_call_id": "call00000",
        "name": "look",
        "content": "a door",
    }
    one: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": calls[:1],
    }
    two = {**one, "tool_calls": calls}
    more = [[user, one], [user, two], [user, {**one, "reasoning_content": "so"}]]
    return [*plain, *more, [user, one, result, said], [user, one, result, one]]


def _call(id: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": id,
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
    }


@dataclass
class Caller:
    """A caller that repeats histories as clients do: with other JSON, without
    reasoning, again, from an earlier place, shortened, or not to the end.
    """

    conversation: Conversation
    random: Random
    tools: Sequence[Any] = ()
    histories: list[list[Message]] = field(default_factory=list)

    async def act(self) -> None:
        """Send one request, or two at once."""
        ask = self._ask

        match self.random.choice(("on", "on", "on", "both", "leave", "earlier", "short")):
            case "both":
                history = self._latest()
                await asyncio.gather(ask(history), ask([*history]))
            case "leave":
                await self._leave(self._latest())
            case "earlier" if self.histories:
                await ask(self.random.choice(self.histories))
            case "short":
                await ask([{"role": "user", "content": "in short: " + self._words()}])
            case _:
                await ask(self._latest())

    async def _ask(self, history: list[Message]) -> None:
        told = [*history, *self._next(history)]
        wishes = {"temperature": self.random.choice((None, 0.1))}
        reply = await self.conversation.chat(
            [self._repeated(message) for message in told], self.tools, wishes=wishes
        )
        self.histories.append([*told, reply.message])

    async def _leave(self, history: list[Message]) -> None:
        task = asyncio.create_task(self._ask(history))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _latest(self) -> list[Message]:
        return self.histories[-1] if self.histories else []

    def _next(self, history: list[Message]) -> list[Message]:
        calls = history[-1].get("tool_calls", []) if history else []
        if not calls:
            return [{"role": "user", "content": self._words()}]

        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": self._words(),
            }
            for call in calls
        ]

    def _words(self) -> str:
        return self.random.choice(SAYINGS) + str(self.random.randrange(3))

    def _repeated(self, message: Message) -> Message:
        """Return the message as another client would send it."""
        made = dict(message)
        if self.random.random() < 0.5:
            made.pop("reasoning_content", None)
        if not made.get("content"):
            made["content"] = self.random.choice((None, ""))
        if made.get("tool_calls"):
            made["tool_calls"] = [self._reordered(call) for call in made["tool_calls"]]
        return made

    def _reordered(self, call: dict[str, Any]) -> dict[str, Any]:
        given = json.loads(call["function"]["arguments"])
        keys = self.random.sample(sorted(given), len(given))
        text = json.dumps({key: given[key] for key in keys}, indent=self.random.choice((None, 2)))
        return {**call, "function": {**call["function"], "arguments": text}}


async def check_recording(
    renderer: Renderer,
    says: Callable[[Random], tuple[int, ...]],
    seed: int,
    *,
    tools: bool = False,
) -> Conversation:
    """Play a random episode, and check its rows.

    Args:
        says: draws the sampled ids of a turn, with the token that ends it.

    Returns:
        The conversation, which is closed.
    """
    random = Random(seed)  # noqa: S311
    rollout = Scripted(lambda _: says(random), pause=1e-4)
    request = Request((), 1, seed=seed)
    conversation = Conversation(
        rollout,
        renderer,
        Limits(completion_tokens=512),
        request,
    )
    caller = Caller(conversation, random, [TOOL] if tools else [])

    for _ in range(ROUNDS):
        try:
            await caller.act()
        except ConversationOver:
            break
    rows = conversation.close()
    check_rows(rows, rollout.answered)
    seeds = [request.seed for request in rollout.requests]
    assert len(set(seeds)) == len(seeds), f"two turns of an episode have one seed: {seeds}"
    return conversation
