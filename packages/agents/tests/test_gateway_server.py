"""Keys, limits, disconnects and failures of the gateway, and hostile requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest
from gateways import (
    check_error,
    client_of,
    raw,
    renderer,
    run,
    said,
    serving,
    still_works,
    talk,
)
from hostile_requests import ASK, BODIES, NO_REQUEST, PATHS, REFUSED, STRANGE

from coupler.conversation import Conversation, Limits
from coupler.errors import CouplerError, ReplicaDied
from coupler.interfaces import Completion, Request
from coupler_agents.gateway import Bounds, Gateway

NUM_HOSTILE = 400


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


def spoiled(random: Random) -> tuple[str, bytes]:
    """A path, and a good body with one to three strange values or cut anywhere."""
    path = random.choice(PATHS)
    body = json.loads(json.dumps(BODIES[path]))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        *outer, last = random.choice(list(places(body)))
        at = body
        for key in outer:
            at = at[key]
        strange = random.choice(STRANGE)
        if random.random() < 0.1:
            del at[last]
        else:
            at[last] = json.loads(json.dumps(strange))

    raw = json.dumps(body).encode()
    match random.randrange(12):
        case 0:
            raw = raw[: random.randrange(len(raw))]
        case 1:
            spot = random.randrange(len(raw))
            raw = raw[:spot] + bytes([random.randrange(256)]) + raw[spot + 1 :]
    return path, raw


@pytest.mark.parametrize("seed", range(4))
def test_hostile_bodies_get_a_sentence(seed: int) -> None:
    random = Random(seed)
    conversation, _ = talk("3")
    other, rollout = talk("3")

    async def episode() -> None:
        statuses: set[int] = set()
        async with serving() as gateway:
            session, beside = gateway.open(conversation), gateway.open(other)
            async with client_of(session) as client:
                for number in range(NUM_HOSTILE // 4):
                    path, raw = spoiled(random)
                    answer = await client.post(path, content=raw)
                    assert answer.status_code < 500, (
                        f"{seed=} {number=} {path} {raw!r} {answer.text}"
                    )
                    statuses.add(answer.status_code)
                    if answer.status_code != 200:
                        check_error(answer, path)
            assert session.failure is None
            await still_works(beside)
        assert statuses >= {200, 400}

    run(episode())
    assert len(rollout.requests) == 1
    conversation.close()


@pytest.mark.parametrize(("path", "more", "words"), REFUSED)
def test_what_is_refused_says_why(path: str, more: dict[str, Any], words: str) -> None:
    conversation, rollout = talk("3")

    async def episode() -> None:
        async with serving() as gateway:
            session = gateway.open(conversation)
            async with client_of(session) as client:
                answer = await client.post(path, json=BODIES[path] | more)
            assert answer.status_code in (400, 404)
            assert words in check_error(answer, path)

    run(episode())
    assert not rollout.requests


@pytest.mark.parametrize(("raw", "words"), NO_REQUEST)
def test_a_body_that_is_no_request(raw: bytes, words: str) -> None:
    async def episode() -> None:
        async with serving() as gateway:
            session = gateway.open(talk("3")[0])
            async with client_of(session) as client:
                answer = await client.post(PATHS[0], content=raw)
            assert answer.status_code == 400
            assert words in check_error(answer, PATHS[0])
            await still_works(session)

    run(episode())


def test_keys() -> None:
    """No key, a wrong one, another episode's, and one whose episode has ended."""
    first, _ = talk("3")
    second, _ = talk("3")

    async def episode() -> None:
        async with serving() as gateway:
            one, two = gateway.open(first), gateway.open(second)
            assert one.api_key != two.api_key and len(one.api_key) >= 43
            async with httpx.AsyncClient(base_url=gateway.url) as client:
                for path in PATHS:
                    for headers in (
                        {},
                        {"Authorization": "Bearer"},
                        {"Authorization": f"Bearer {one.api_key[:-1]}"},
                        {"Authorization": f"Basic {one.api_key}"},
                        {b"x-api-key": b"\xff" * 43},
                    ):
                        answer = await client.post(path, json=BODIES[path], headers=headers)
                        assert answer.status_code == 401
                        check_error(answer, path)

                for headers in (
                    {"x-api-key": one.api_key},
                    {"Authorization": f"bearer {one.api_key}"},
                ):
                    answer = await client.post(PATHS[0], json=ASK, headers=headers)
                    assert answer.status_code == 200
                assert len(first.tree.turns) == 2 and not second.tree.turns

                gateway.end(one)
                gateway.end(one)
                answer = await client.post(PATHS[2], json=ASK, headers={"x-api-key": one.api_key})
                assert answer.status_code == 410
                assert answer.headers["x-should-retry"] == "false"
                assert "has ended" in check_error(answer, PATHS[2])
            await still_works(two)

    run(episode())


def test_paths_and_methods() -> None:
    async def episode() -> None:
        async with serving() as gateway:
            session = gateway.open(talk("3")[0])
            async with client_of(session) as client:
                assert (await client.get(PATHS[0])).status_code == 405
                answer = await client.post("/v1/completions", json={})
                assert answer.status_code == 404
                assert PATHS[0] in check_error(answer, "/")
                assert (await client.get("/v1/models")).json()["data"][0]["id"] == "policy"

    run(episode())


def test_a_client_that_leaves_leaves_no_turn() -> None:
    conversation, rollout = talk("3")
    rollout.pause = 0.3

    async def episode() -> None:
        async with serving() as gateway:
            session = gateway.open(conversation)
            async with client_of(session) as client:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(PATHS[0], json=ASK, timeout=0.1)
            await asyncio.sleep(0.4)
            assert len(rollout.requests) == 1 and not conversation.tree.turns
            await still_works(session)

    run(episode())
    (row,) = conversation.close()
    assert row.trajectory.sampled == said("3")


def test_an_end_stops_what_runs() -> None:
    conversation, rollout = talk("3")
    rollout.pause = 30.0

    async def episode() -> None:
        async with serving() as gateway:
            session = gateway.open(conversation)
            async with client_of(session) as client:
                running = asyncio.create_task(client.post(PATHS[0], json=ASK))
                while not rollout.requests:
                    await asyncio.sleep(0.01)
                gateway.end(session)
                answer = await running
            assert answer.status_code == 410

    run(episode())
    assert not conversation.tree.turns


def test_requests_at_once_are_bounded() -> None:
    conversation, rollout = talk("3")
    rollout.pause = 0.2

    async def episode() -> None:
        async with serving(Bounds(in_flight=3)) as gateway:
            session = gateway.open(conversation)
            async with client_of(session) as client:
                answers = await asyncio.gather(*(client.post(PATHS[0], json=ASK) for _ in range(8)))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [200] * 3 + [429] * 5
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert refused.headers["x-should-retry"] == "true"
            await still_works(session)

    run(episode())


def test_a_body_has_a_limit() -> None:
    async def episode() -> None:
        async with serving(Bounds(body=1000)) as gateway:
            session = gateway.open(talk("3")[0])

            async def parts() -> Any:
                for _ in range(10):
                    yield b" " * 300

            async with client_of(session) as client:
                for content in (b" " * 1001, parts()):
                    answer = await client.post(PATHS[0], content=content)
                    assert answer.status_code == 413
                    assert "more than 1000 bytes" in check_error(answer, PATHS[0])
                compressed = {"Content-Encoding": "gzip"}
                answer = await client.post(PATHS[0], content=b"x", headers=compressed)
                assert answer.status_code == 415
            await still_works(session)

    run(episode())


def test_slow_and_malformed_clients_are_dropped() -> None:
    async def episode() -> None:
        bounds = Bounds(receive_seconds=0.3, idle_seconds=0.5)
        async with serving(bounds) as gateway:
            session = gateway.open(talk("3")[0])
            head = (
                f"POST {PATHS[0]} HTTP/1.1\r\nHost: x\r\nx-api-key: {session.api_key}\r\n".encode()
            )
            assert await raw(session) == b""
            endless = [head, *[b"X-Slow: y\r\n"] * 9]
            assert await raw(session, *endless, pause=0.1) == b""
            slow = [head + b"Content-Length: 90\r\n\r\n", *[b" "] * 9]
            assert b" 408 " in (await raw(session, *slow, pause=0.1)).partition(b"\r\n")[0]
            assert await raw(session, head + b"Content-Length: 90\r\n\r\n{") != b""
            await still_works(session)

    run(episode())


def test_connections_are_bounded() -> None:
    async def episode() -> None:
        async with serving(Bounds(connections=3)) as gateway:
            session = gateway.open(talk("3")[0])
            host, port = session.url.removeprefix("http://").split(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            assert await raw(session, b"GET / HTTP/1.1\r\n\r\n") == b""
            for _, writer in held:
                writer.close()
            await asyncio.sleep(0.05)
            await still_works(session)

    run(episode())


@pytest.mark.parametrize(
    ("error", "status"),
    [(ReplicaDied("it ended"), 502), (OSError("no"), 502), (TimeoutError(), 502)],
)
def test_a_failure_of_the_rollout_is_kept(error: Exception, status: int) -> None:
    class Broken:
        async def generate(self, request: Request) -> Completion:
            raise error

    conversation = Conversation(Broken(), renderer(), Limits(9), Request((), 1))

    async def episode() -> None:
        async with serving() as gateway:
            session = gateway.open(conversation)
            async with client_of(session) as client:
                answer = await client.post(PATHS[0], json=ASK)
            assert answer.status_code == status
            assert f"the rollout failed: {type(error).__name__}" in check_error(answer, PATHS[0])
            assert session.failure is error

    run(episode())
    assert conversation.close() == ()


def test_a_session_needs_a_gateway_that_listens() -> None:
    async def episode() -> None:
        with pytest.raises(CouplerError, match=r"call:  await gateway.start\(\)"):
            Gateway().open(talk("3")[0])

    run(episode())


def test_the_gateway_listens_on_the_loopback_alone() -> None:
    async def episode() -> None:
        async with serving() as gateway:
            assert gateway.url.startswith("http://127.0.0.1:")
            session = gateway.open(talk("3")[0])
            assert session.api_key not in repr(session)
            await still_works(session)
            closed = gateway.url
        with pytest.raises(httpx.ConnectError):
            httpx.get(closed, timeout=5)

    run(episode())
