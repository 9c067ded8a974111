"""Speak OpenAI's Responses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from coupler.conversation import Reply
from coupler_agents.gateway.session import Session
from coupler_agents.gateway.wire import (
    NO_CHOICE,
    Asked,
    Call,
    Object,
    Refused,
    Spoken,
    flag,
    frame,
    joined,
    member,
    members,
    new_id,
    refuse,
    shown,
    text,
    tool,
    whole,
    wishes,
)

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
PARTS = ("input_text", "output_text", "text", "refusal")
UNSUPPORTED = {
    "background": (),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "context_management": (),
}
FORMAT = {"format": ({"type": "text"},)}


async def answer(session: Session, body: Object) -> Object | list[bytes]:
    """Sample a turn for a request, and keep it for requests that continue it.

    Raises:
        Refused: the request is wrong, asks for what the gateway cannot do, or continues
            a response that this session has not.
    """
    before = _before(session, body)
    asked = read(body, before)

    reply = await session.chat(asked)
    made = response(asked, reply)
    if made["store"]:
        told = asked.messages[int(bool(text(body, "instructions"))) :]
        session.told[made["id"]] = [*told, dict(reply.message)]
    return list(events(made)) if asked.stream else made


def read(body: Object, before: list[Object]) -> Asked:
    """Translate a request that continues some messages."""
    refuse(body, UNSUPPORTED)
    refuse(member(body, "text"), FORMAT)
    if "message.output_text.logprobs" in (body.get("include") or ()):
        raise Refused(
            "log-probs are not supported here. Use /v1/chat/completions with logprobs=true.",
            code="unsupported",
        )

    rules = text(body, "instructions")
    return Asked(
        body,
        [*([{"role": "system", "content": rules}] if rules else []), *before, *_input(body)],
        _tools(body),
        whole(body, "max_output_tokens"),
        flag(body, "stream"),
        wishes(body),
    )


def response(asked: Asked, reply: Reply) -> Object:
    """Return the response of a turn."""
    body, said = asked.body, Spoken.of(reply)
    whole_turn = reply.finish == "stop"
    status = "completed" if whole_turn else "incomplete"
    fed, sampled = reply.usage

    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None if whole_turn else {"reason": "max_output_tokens"},
        "instructions": body.get("instructions"),
        "max_output_tokens": asked.max_tokens,
        "model": asked.model,
        "output": list(_output(said, status)),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "metadata": body.get("metadata") or {},
        "usage": {
            "input_tokens": fed,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": fed + sampled,
        },
    }


def events(made: Object) -> Iterator[bytes]:
    """Yield a response as the events of a stream."""
    numbers = count()

    def event(name: str, /, **held: Any) -> bytes:
        kind = f"response.{name}"
        return frame({"type": kind, "sequence_number": next(numbers), **held}, kind)

    begun = {**made, "status": "in_progress", "output": [], "usage": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(made["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {name: value for name, value in item.items() if name != "status"}
        empty |= {"status": "in_progress"}
        empty |= {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("output_item.added", output_index=index, item=empty)

        if item["type"] == "function_call":
            given = item["arguments"]
            yield event("function_call_arguments.delta", delta=given, **place)
            yield event(
                "function_call_arguments.done",
                arguments=given,
                name=item["name"],
                **place,
            )
        else:
            yield from _content_events(event, item, place)
        yield event("output_item.done", output_index=index, item=item)
    yield event(made["status"], response=made)


def _content_events(event: Any, item: Object, place: Object) -> Iterator[bytes]:
    (part,) = item["content"]
    place = {**place, "content_index": 0}
    name, more = "reasoning_text", {}
    if item["type"] == "message":
        name, more = "output_text", {"logprobs": []}

    yield event("content_part.added", part={**part, "text": ""}, **place)
    yield event(f"{name}.delta", delta=part["text"], **place, **more)
    yield event(f"{name}.done", text=part["text"], **place, **more)
    yield event("content_part.done", part=part, **place)


def _output(said: Spoken, status: str) -> Iterator[Object]:
    if said.reasoning:
        yield {
            "id": new_id("rs_"),
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": said.reasoning}],
            "status": status,
        }

    if said.text or not said.calls:
        yield {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [
                {
                    "type": "output_text",
                    "text": said.text,
                    "annotations": [],
                    "logprobs": [],
                }
            ],
        }
    yield from (_function_call(call, status) for call in said.calls)


def _function_call(call: Call, status: str) -> Object:
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def _before(session: Session, body: Object) -> list[Object]:
    """Return the messages up to the response that a request continues."""
    previous = text(body, "previous_response_id")
    if previous and previous not in session.told:
        raise Refused(
            f"previous_response_id={shown(previous)} is no stored response of this session. "
            "Send the whole input.",
            404,
            "previous_response_not_found",
        )
    return session.told[previous] if previous else []


def _tools(body: Object) -> list[Object]:
    tools = members(body, "tools")
    if body.get("tool_choice") in NO_CHOICE:
        return []

    found: list[Object] = []
    for number, each in enumerate(tools):
        if each.get("type") != "function":
            raise Refused(
                f"tools[{number}] has type {shown(each.get('type'))}, and only functions are "
                "supported.",
                code="unsupported",
            )
        found.append(tool(each, f"tools[{number}]", "parameters"))
    return found


def _input(body: Object) -> list[Object]:
    """Translate the items of the input. Items of one answer become one message."""
    if isinstance(body.get("input"), str):
        return [{"role": "user", "content": body["input"]}]

    told: list[Object] = []
    for number, item in enumerate(members(body, "input")):
        place = f"input[{number}]"
        kind = text(item, "type", "message")
        match kind:
            case "message":
                _add_message(told, item, place)
            case "reasoning":
                _add(told, reasoning_content=_reasoning(item, place))
            case "function_call":
                _add(told, tool_calls=[_called(item)])
            case "function_call_output":
                told.append(
                    {
                        "role": "tool",
                        "tool_call_id": text(item, "call_id"),
                        "content": joined(item.get("output"), f"{place}.output", PARTS),
                    }
                )
            case _:
                raise Refused(
                    f"{place} has type {shown(kind)}, which is not supported. Send messages, "
                    "reasoning, function calls and their outputs.",
                    code="unsupported",
                )
    return told


def _add_message(told: list[Object], item: Object, place: str) -> None:
    role = text(item, "role")
    if role not in ROLES:
        raise Refused(f"{place} has role {shown(role)}. Set it to one of {', '.join(ROLES)}.")
    content = joined(item.get("content"), f"{place}.content", PARTS)

    if role == "assistant":
        _add(told, content=content)
    else:
        told.append({"role": ROLES[role], "content": content})


def _add(told: list[Object], **part: Any) -> None:
    """Add a part of an answer to the last message, if that is an answer without it and
    without what comes later. Reasoning comes first, then text, then calls.
    """
    ((name, value),) = part.items()
    last: Object = told[-1] if told else {}
    later = {
        "reasoning_content": ("reasoning_content", "content", "tool_calls"),
        "content": ("content", "tool_calls"),
        "tool_calls": (),
    }

    if last.get("role") != "assistant" or any(other in last for other in later[name]):
        last = {"role": "assistant"}
        told.append(last)
    last[name] = last.get(name, []) + value if name == "tool_calls" else value


def _reasoning(item: Object, place: str) -> str:
    thought = joined(
        item.get("content"),
        f"{place}.content",
        ("reasoning_text", "text"),
    )
    return thought or joined(item.get("summary"), f"{place}.summary", ("summary_text",))


def _called(item: Object) -> Object:
    return {
        "id": text(item, "call_id"),
        "type": "function",
        "function": {"name": text(item, "name"), "arguments": text(item, "arguments")},
    }
