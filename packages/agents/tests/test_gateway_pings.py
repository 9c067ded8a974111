"""A stream whose turn takes longer than its client waits is kept open with pings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gateways import renderer, run, said, serving, talk

from coupler.conversation import Conversation, Limits
from coupler.errors import ReplicaDied
from coupler.interfaces import Completion, Request
from coupler_agents.gateway import Bounds, Session

SLOW_S, PATIENCE_S = 1.0, 0.4
PINGS = Bounds(ping_seconds=0.1)
USER: list[Any] = [{"role": "user", "content": "a"}]
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def impatient(session: Session) -> dict[str, Any]:
    """Options of an official client that waits less than a turn takes."""
    return {"api_key": session.api_key, "max_retries": 0, "timeout": PATIENCE_S}


async def chat(session: Session) -> str:
    async with openai.AsyncOpenAI(base_url=session.base_url, **impatient(session)) as client:
        made = await client.chat.completions.create(model="policy", messages=USER, stream=True)
        chunks = [chunk async for chunk in made]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def responses(session: Session) -> str:
    async with openai.AsyncOpenAI(base_url=session.base_url, **impatient(session)) as client:
        made = await client.responses.create(model="policy", input=USER, stream=True)
        events = [event async for event in made]
    return "".join(e.delta for e in events if e.type == "response.output_text.delta")


async def messages(session: Session) -> str:
    async with (
        anthropic.AsyncAnthropic(base_url=session.url, **impatient(session)) as client,
        client.messages.stream(model="policy", max_tokens=64, messages=USER) as stream,
    ):
        return await stream.get_final_text()


CLIENTS = dict(zip(PATHS, (chat, responses, messages), strict=True))
Client = Callable[[Session], Awaitable[str]]


@pytest.mark.parametrize("client", CLIENTS.values())
def test_a_client_with_little_patience_gets_its_turn(client: Client) -> None:
    conversation, rollout = talk("the answer is 3 .")
    rollout.pause = SLOW_S

    async def episode() -> None:
        async with serving(PINGS) as gateway:
            assert await client(gateway.open(conversation)) == "the answer is 3 ."

    run(episode())
    (row,) = conversation.close()
    assert row.trajectory.sampled == said("the answer is 3 .")


@pytest.mark.parametrize("client", CLIENTS.values())
def test_without_pings_it_gives_up(client: Client) -> None:
    conversation, rollout = talk("3")
    rollout.pause = SLOW_S

    async def episode() -> None:
        async with serving() as gateway:
            with pytest.raises((openai.APITimeoutError, anthropic.APITimeoutError)):
                await client(gateway.open(conversation))

    run(episode())
    assert not conversation.tree.turns


async def asked(session: Session, path: str) -> httpx.Response:
    """Ask for a stream, and return all of it."""
    body = {"model": "policy", "messages": USER, "input": USER, "max_tokens": 9, "stream": True}
    async with httpx.AsyncClient(base_url=session.url, timeout=20) as client:
        return await client.post(path, json=body, headers={"X-Api-Key": session.api_key})


@pytest.mark.parametrize("path", PATHS)
def test_pings_come_before_the_turn(path: str) -> None:
    conversation, rollout = talk("3")

    async def episode() -> None:
        async with serving(PINGS) as gateway:
            session = gateway.open(conversation)
            quick = await asked(session, path)
            rollout.pause = 0.35
            slow = await asked(session, path)

        ping = "event: ping\n" if path == PATHS[2] else ": ping\n"
        assert "ping" not in quick.text
        assert 2 <= slow.text.count("ping\n") <= 4 and slow.text.startswith(ping)
        assert slow.headers["content-type"] == quick.headers["content-type"]
        events = [text.split("\n\n")[-2:] for text in (quick.text, slow.text)]
        assert all(len(event) == 2 for event in events)

    run(episode())


class Breaks:
    """A rollout that fails after a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(self.seconds)
        raise ReplicaDied("it ended")


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_behind_a_ping_is_an_event(path: str) -> None:
    async def episode() -> None:
        for seconds, status in ((0.0, 502), (0.3, 200)):
            conversation = Conversation(Breaks(seconds), renderer(), Limits(9), Request((), 1))
            async with serving(PINGS) as gateway:
                session = gateway.open(conversation)
                answer = await asked(session, path)
                assert answer.status_code == status
                assert isinstance(session.failure, ReplicaDied)
                if seconds:
                    assert "event: error\n" in answer.text
                    with pytest.raises((openai.APIError, anthropic.APIError), match="it ended"):
                        await CLIENTS[path](session)

    run(episode())


@pytest.mark.parametrize("path", PATHS)
def test_a_session_that_ends_ends_its_streams(path: str) -> None:
    conversation, rollout = talk("3")
    rollout.pause = 30.0

    async def episode() -> None:
        async with serving(PINGS) as gateway:
            session = gateway.open(conversation)
            running = asyncio.create_task(asked(session, path))
            while not conversation.running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(3 * PINGS.ping_seconds)
            gateway.end(session)
            answer = await running
        assert "this episode has ended" in answer.text and "event: error\n" in answer.text

    run(episode())
    assert not conversation.tree.turns and not conversation.running


def test_a_client_that_leaves_its_stream_leaves_no_turn() -> None:
    conversation, rollout = talk("3")
    rollout.pause = 1.0

    async def episode() -> None:
        async with serving(PINGS) as gateway:
            session = gateway.open(conversation)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asked(session, PATHS[0]), 0.3)
            async with asyncio.timeout(5):
                while conversation.running:
                    await asyncio.sleep(0.01)
            rollout.pause = 0.0
            assert (await asked(session, PATHS[0])).status_code == 200

    run(episode())
    assert len(conversation.tree.turns) == 1
