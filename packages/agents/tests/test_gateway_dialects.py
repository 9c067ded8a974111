"""Every dialect over its official client: one episode gives the same rows."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from gateways import ANSWERS, LOOK, PARAMETERS, RESULTS, recorded, renderer, run, said, talk
from openai import AsyncOpenAI

from coupler.conversation import Row
from coupler_agents.gateway import Session

ASKED = ("what is 1 + 2 ?", "go on")
RULES = "be brief"
TOOLS = [{"type": "function", "function": LOOK}]


def told(row: Row) -> list[tuple[Any, ...]]:
    """What is trained of a row. Log-probs tell each sampled token from all others."""
    return [(s.ids, s.origin, s.logprobs, s.versions) for s in row.trajectory.segments if s.ids]


def in_process() -> tuple[list[Any], int]:
    conversation, _ = talk(*ANSWERS)

    async def episode() -> None:
        history: list[Any] = [
            {"role": "system", "content": RULES},
            {"role": "user", "content": ASKED[0]},
        ]
        for turn in range(4):
            reply = await conversation.chat(history, TOOLS)
            history.append(reply.message)
            for call, result in zip(
                reply.message.get("tool_calls", []), (*RESULTS, (), ())[turn], strict=True
            ):
                history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if turn == 2:
                history.append({"role": "user", "content": ASKED[1]})

    run(episode())
    return [told(row) for row in conversation.close()], len(conversation.forks)


def openai_of(session: Session) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


def anthropic_of(session: Session) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=session.url, api_key=session.api_key, max_retries=0)


async def chat(session: Session) -> None:
    history: list[Any] = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": [{"type": "text", "text": ASKED[0]}]},
    ]
    async with openai_of(session) as client:
        for turn in range(4):
            made = await client.chat.completions.create(
                model="policy", messages=history, tools=TOOLS, temperature=0.3
            )
            (choice,) = made.choices
            history.append(choice.message.model_dump(exclude_none=True))
            calls = choice.message.tool_calls or []
            assert choice.finish_reason == ("tool_calls" if turn < 2 else "stop")
            for call, result in zip(calls, (*RESULTS, (), ())[turn], strict=True):
                assert call.function.name == "look" and json.loads(call.function.arguments)["at"]
                history.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if turn == 2:
                assert choice.message.content == ANSWERS[2]
                history.append({"role": "user", "content": ASKED[1]})


async def chat_stream(session: Session) -> None:
    history: list[Any] = [
        {"role": "developer", "content": RULES},
        {"role": "user", "content": ASKED[0]},
    ]
    async with openai_of(session) as client:
        for turn in range(4):
            message: dict[str, Any] = {"role": "assistant", "content": ""}
            calls: dict[int, Any] = {}
            finish, usage = None, None
            async for chunk in await client.chat.completions.create(
                model="policy",
                messages=history,
                tools=TOOLS,
                stream=True,
                stream_options={"include_usage": True},
            ):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    message["content"] += choice.delta.content or ""
                    for call in choice.delta.tool_calls or []:
                        calls[call.index] = call.model_dump(exclude={"index"})
            assert usage is not None and usage.completion_tokens == len(said(ANSWERS[turn]))
            assert finish == ("tool_calls" if turn < 2 else "stop")
            if calls:
                message["tool_calls"] = list(calls.values())
            history.append(message)
            for call, result in zip(calls.values(), (*RESULTS, (), ())[turn], strict=True):
                history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if turn == 2:
                history.append({"role": "user", "content": ASKED[1]})


RESPONSES_TOOLS: list[Any] = [{"type": "function", "strict": True, **LOOK}]


async def responses(session: Session, stream: bool = False) -> None:
    history: list[Any] = [{"role": "user", "content": ASKED[0]}]
    async with openai_of(session) as client:
        for turn in range(4):
            given: dict[str, Any] = {
                "model": "policy",
                "input": history,
                "instructions": RULES,
                "tools": RESPONSES_TOOLS,
            }
            if stream:
                made, kinds = None, []
                async for event in await client.responses.create(**given, stream=True):
                    kinds.append(event.type)
                    if event.type == "response.completed":
                        made = event.response
                assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            else:
                made = await client.responses.create(**given, store=False)
            assert made is not None and made.status == "completed"
            history += [item.model_dump(exclude_none=True) for item in made.output]
            history += outputs(made, turn)


async def responses_stream(session: Session) -> None:
    await responses(session, stream=True)


async def responses_continued(session: Session) -> None:
    """Sends only what is new, and the id of the response before."""
    new: Any = ASKED[0]
    previous: Any = None
    async with openai_of(session) as client:
        for turn in range(4):
            made = await client.responses.create(
                model="policy",
                input=new,
                instructions=RULES,
                tools=RESPONSES_TOOLS,
                previous_response_id=previous,
            )
            previous, new = made.id, outputs(made, turn)


def outputs(made: Any, turn: int) -> list[Any]:
    calls = [item for item in made.output if item.type == "function_call"]
    pairs = zip(calls, (*RESULTS, (), ())[turn], strict=True)
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in pairs
    ]
    return [*results, *([{"role": "user", "content": ASKED[1]}] if turn == 2 else [])]


ANTHROPIC_TOOLS: list[Any] = [
    {"name": "look", "description": LOOK["description"], "input_schema": PARAMETERS}
]


async def messages(session: Session, stream: bool = False) -> None:
    history: list[Any] = [{"role": "user", "content": ASKED[0]}]
    async with anthropic_of(session) as client:
        for turn in range(4):
            given: dict[str, Any] = {
                "model": "policy",
                "max_tokens": 4096,
                "system": [{"type": "text", "text": RULES}],
                "messages": history,
                "tools": ANTHROPIC_TOOLS,
            }
            counted = await client.messages.count_tokens(
                **{name: value for name, value in given.items() if name != "max_tokens"}
            )
            if stream:
                async with client.messages.stream(**given) as events:
                    made = await events.get_final_message()
            else:
                made = await client.messages.create(**given)
            assert made.usage.input_tokens == counted.input_tokens
            assert made.stop_reason == ("tool_use" if turn < 2 else "end_turn")
            content = [block.model_dump(exclude_none=True) for block in made.content]
            history.append({"role": "assistant", "content": content})
            calls = [block for block in made.content if block.type == "tool_use"]
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": call.id, "content": result}
                for call, result in zip(calls, (*RESULTS, (), ())[turn], strict=True)
            ]
            if turn == 2:
                results.append({"type": "text", "text": ASKED[1]})
            history.append({"role": "user", "content": results})


async def messages_stream(session: Session) -> None:
    await messages(session, stream=True)


@pytest.mark.parametrize(
    "play",
    [
        chat,
        chat_stream,
        responses,
        responses_stream,
        responses_continued,
        messages,
        messages_stream,
    ],
)
def test_an_episode_gives_the_same_rows_in_every_dialect(play: Any) -> None:
    rows, conversation = recorded(play)
    assert ([told(row) for row in rows], len(conversation.forks)) == in_process()
    assert len(rows) == 1 and len(rows[0].completions) == 4
    assert conversation.overruled == (4 if play is chat else 0)


def test_token_ids_give_the_same_tokens() -> None:
    """A caller of ids feeds what the others were fed. What it adds has no glue."""
    wanted, _ = recorded(chat)

    async def play(session: Session) -> None:
        fed: list[int] = []
        async with httpx.AsyncClient(headers={"x-api-key": session.api_key}) as client:
            for segment in wanted[0].trajectory.segments:
                if segment.origin != "sampled":
                    fed += segment.ids
                    continue
                answer = await client.post(
                    f"{session.url}/inference/v1/generate",
                    json={"token_ids": fed, "sampling_params": {"max_tokens": 400}},
                )
                (choice,) = answer.json()["choices"]
                assert choice["token_ids"] == list(segment.ids)
                assert choice["versions"] == list(segment.versions)
                pairs = choice["logprobs"]["content"]
                assert [pair["logprob"] for pair in pairs] == list(segment.logprobs)
                fed += choice["token_ids"]

    (row,), _ = recorded(play)
    ids = [[i for s in r.trajectory.segments for i in s.ids] for r in (row, wanted[0])]
    assert ids[0] == ids[1]
    assert row.trajectory.sampled == wanted[0].trajectory.sampled


def test_logprobs_where_asked() -> None:
    async def play(session: Session) -> None:
        async with openai_of(session) as client:
            made = await client.chat.completions.create(
                model="x", messages=[{"role": "user", "content": "a"}], logprobs=True
            )
        logprobs = made.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [each.token for each in logprobs.content] == [f"token_id:{i}" for i in said("3")]
        assert [each.logprob for each in logprobs.content] == [-1.0, -2.0]

    recorded(play, "3")


def test_models_are_listed_for_both_clients() -> None:
    async def play(session: Session) -> None:
        async with openai_of(session) as one, anthropic_of(session) as other:
            assert [model.id async for model in one.models.list()] == ["policy"]
            assert [model.id async for model in other.models.list()] == ["policy"]

    recorded(play)


def test_a_cut_turn_says_so_and_ends_the_episode() -> None:
    import anthropic
    import openai

    async def play(session: Session) -> None:
        session.conversation.rollout.finish = "length"  # type: ignore[attr-defined]
        user: Any = {"role": "user", "content": "a"}
        async with openai_of(session) as client:
            made = await client.chat.completions.create(model="x", messages=[user], max_tokens=2)
            assert made.choices[0].finish_reason == "length"
            assert made.usage is not None and made.usage.completion_tokens == 2
            with pytest.raises(openai.BadRequestError, match=r"has ended \(reason: length\)"):
                await client.responses.create(model="x", input="a")
        async with anthropic_of(session) as other:
            with pytest.raises(anthropic.BadRequestError, match=r"has ended \(reason: length\)"):
                await other.messages.create(model="x", messages=[user], max_tokens=2)

    (row,), _ = recorded(play, "a long answer")
    assert len(row.trajectory.sampled) == 2


def test_counting_leaves_no_turn() -> None:
    conversation, rollout = talk("3")
    user = {"role": "user", "content": "a"}
    assert asyncio.run(conversation.count([user])) == len(renderer().render([user], []))
    assert not rollout.requests and not conversation.tree.turns
