"""Keys, limits, disconnects and failures of the gateway, and hostile requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest
from gateways import LOOK, renderer, run, said, serving, talk

from coupler.conversation import Conversation, Limits
from coupler.errors import CouplerError, ReplicaDied
from coupler.interfaces import Completion, Request
from coupler_agents.gateway import Bounds, Gateway, Session

USER = {"role": "user", "content": "a"}
ASK = {"model": "policy", "messages": [USER]}
PATHS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/inference/v1/generate",
)
BODIES: dict[str, dict[str, Any]] = {
    PATHS[0]: {
        **ASK,
        "tools": [{"type": "function", "function": LOOK}],
        "tool_choice": "auto",
        "max_tokens": 5,
        "temperature": 0.5,
        "stream": False,
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "logprobs": False,
        "n": 1,
    },
    PATHS[1]: {
        "model": "policy",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "b"}],
            },
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "d"},
        ],
        "instructions": "e",
        "tools": [{"type": "function", **LOOK}],
        "previous_response_id": None,
        "store": True,
        "include": [],
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 5,
    },
    PATHS[2]: {
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "look", "input": {"at": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "d"}],
            },
        ],
        "tools": [{"name": "look", "description": "x", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
    },
    PATHS[4]: {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 3, "n": 1},
        "stream": False,
    },
}
BODIES[PATHS[3]] = BODIES[PATHS[2]]
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 10**30, -(2**63), 1e308, "", "x", "\x00", "<|im_end|>", "é🙂",
    [], {}, [[]], [None], [0], ["x"], [{}], {"type": "text"}, {"type": "image_url"},
    {"type": None}, {"text": 5}, {"": {}}, [{"type": "text", "text": "a"}],
    [{"type": "text", "text": None}], {"role": "user"}, {"function": None},
    {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}, '"\\ud800"', "{", "assistant",
    "tool", ["text"], {"name": "f", "parameters": {"a": [1]}}, "required", 2**31, 10**400,
)  # fmt: skip
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


def client_of(session: Session) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=session.url,
        headers={"Authorization": f"Bearer {session.api_key}"},
        timeout=20.0,
    )


async def still_works(session: Session) -> None:
    async with client_of(session) as client:
        answer = await client.post("/v1/chat/completions", json=ASK)
    assert answer.status_code == 200, answer.text


def check_error(answer: httpx.Response, path: str) -> str:
    """The sentence of an error, in the shape of its dialect."""
    held = answer.json()
    assert (held.get("type") == "error") == path.startswith("/v1/messages"), held
    sentence = held["error"]["message"]
    assert sentence.strip() and "\n" not in sentence and "Traceback" not in sentence
    return sentence


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


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        (PATHS[0], {"n": 2}, "n=2 is not supported"),
        (PATHS[0], {"logit_bias": {"5": 1}}, "logit_bias="),
        (PATHS[0], {"response_format": {"type": "json_object"}}, "response_format="),
        (
            PATHS[0],
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "image_url",
        ),
        (PATHS[0], {"messages": [{"role": "king", "content": "x"}]}, 'has role "king"'),
        (PATHS[0], {"messages": []}, "the last message is missing"),
        (PATHS[0], {"messages": "x"}, "messages must be a list of objects, and it is a text"),
        (PATHS[0], {"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        (PATHS[0], {"temperature": "hot"}, "temperature must be a number"),
        (PATHS[0], {"tools": [{"type": "custom", "custom": {}}]}, "only functions are supported"),
        (PATHS[0], {"tools": [{"type": "function", "function": {}}]}, "has no name"),
        (PATHS[1], {"previous_response_id": "resp_x"}, "is no stored response of this session"),
        (PATHS[1], {"tools": [{"type": "web_search"}]}, "only functions are supported"),
        (PATHS[1], {"input": [{"type": "item_reference", "id": "x"}]}, "is not supported"),
        (PATHS[1], {"background": True}, "background=true is not supported"),
        (
            PATHS[2],
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            'type "image"',
        ),
        (PATHS[2], {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        (PATHS[2], {"mcp_servers": [{"url": "x"}]}, "mcp_servers="),
        (PATHS[4], {"token_ids": []}, "token_ids must be a list"),
        (PATHS[4], {"token_ids": [-1]}, "which is no token id"),
        (PATHS[4], {"stream": True}, "stream=true is not supported"),
        (PATHS[4], {"sampling_params": {"n": 3}}, "n=3 is not supported"),
    ],
)
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


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object, and it is a list"),
        (b"\xff\xfe", "not JSON"),
        (b'{"messages": ' + b"[" * 200_000, "not JSON"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "nests deeper than 64 levels"),
        (b'{"a": 1' + b"0" * 40 + b', "b": ' + b"[" * 90000 + b"]" * 90000 + b"}", "nests deeper"),
        (b'{"n": ' + b"9" * 6000 + b"}", "not JSON"),
    ],
)
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
            for broken in (
                b"\x16\x03\x01\x02\x00\x01",
                b"GET\r\n\r\n",
                head + b"Content-Length: -5\r\n\r\n",
                head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
                head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
                head + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
            ):
                answer = await raw(session, broken)
                assert answer == b"" or b" 400 " in answer.partition(b"\r\n")[0], (broken, answer)
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
