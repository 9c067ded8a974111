"""Speak Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from coupler.conversation import Reply
from coupler_agents.gateway.session import Session
from coupler_agents.gateway.wire import (
    NO_CHOICE,
    Asked,
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

TEXT = ("text",)
BETWEEN = "\n\n"  # between blocks of text
UNSUPPORTED = {"mcp_servers": (), "container": (), "context_management": (), "output_format": ()}
FORMAT = {"format": ()}
PING = frame({"type": "ping"}, "ping")
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "api_error",
}


async def answer(session: Session, body: Object) -> Object | list[bytes]:
    """Sample a turn for a request.

    Raises:
        Refused: the request is wrong, or asks for what the gateway cannot do.
    """
    asked = read(body)
    reply = await session.chat(asked)
    made = message(asked, reply)
    return list(events(made)) if asked.stream else made


async def count_tokens(session: Session, body: Object) -> Object:
    """Count the tokens of the prompt that a request would make."""
    asked = read(body)
    return {"input_tokens": await session.conversation.count(asked.messages, asked.tools)}


def read(body: Object) -> Asked:
    """Translate a request."""
    refuse(body, UNSUPPORTED)
    refuse(member(body, "output_config"), FORMAT)

    rules = joined(body.get("system"), "system", TEXT, BETWEEN)
    told: list[Object] = [{"role": "system", "content": rules}] if rules else []
    for number, each in enumerate(members(body, "messages")):
        told += _messages(each, f"messages[{number}]")
    return Asked(
        body,
        told,
        _tools(body),
        whole(body, "max_tokens"),
        flag(body, "stream"),
        wishes(body),
    )


def message(asked: Asked, reply: Reply) -> Object:
    """Return the response of a turn."""
    said = Spoken.of(reply)
    content: list[Object] = []
    if said.reasoning:
        content.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
    if said.text:
        content.append({"type": "text", "text": said.text})
    content += [
        {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": json.loads(call.arguments),
        }
        for call in said.calls
    ]

    fed, sampled = reply.usage
    stopped = "tool_use" if said.calls else "end_turn"
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": content,
        "stop_reason": stopped if reply.finish == "stop" else "max_tokens",
        "stop_sequence": None,
        "usage": {"input_tokens": fed, "output_tokens": sampled},
    }


def events(made: Object) -> Iterator[bytes]:
    """Yield a response as the events of a stream."""

    def event(kind: str, /, **held: Any) -> bytes:
        return frame({"type": kind, **held}, kind)

    usage = made["usage"]
    begun = {**made, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield event("message_start", message=begun)
    for index, block in enumerate(made["content"]):
        empty, deltas = _parts(block)
        yield event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)

    ended = {"stop_reason": made["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
    yield event("message_stop")


def error(status: int, code: str, sentence: str) -> Object:
    """Return an error in the shape of Anthropic."""
    kind = KINDS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": sentence, "code": code}}


def _parts(block: Object) -> tuple[Object, list[Object]]:
    """Return a block as it is when it starts, and what is added to it."""
    kind = block["type"]
    if kind == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [thought, {"type": "signature_delta", "signature": ""}]
    if kind == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]

    given = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    return {**block, "input": {}}, [given]


def _messages(body: Object, place: str) -> list[Object]:
    """Translate a message. Results of tools become messages of their own."""
    role, content = text(body, "role"), body.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refused(f"{place} has role {shown(role)}. Set it to user or assistant.")
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content or ""}]

    blocks = members(body, "content")
    if role == "assistant":
        return [_answer(blocks, place)]
    return list(_told(role, blocks, place))


def _answer(blocks: list[Object], place: str) -> Object:
    said: Object = {"role": "assistant", "content": ""}
    calls: list[Object] = []
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                said["content"] += text(block, "text")
            case "thinking":
                before = said.get("reasoning_content", "")
                said["reasoning_content"] = before + text(block, "thinking")
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_called(block))
            case kind:
                raise _unsupported(f"{place}.content[{number}]", kind)

    return said | ({"tool_calls": calls} if calls else {})


def _told(role: str, blocks: list[Object], place: str) -> Iterator[Object]:
    """Yield a message for each run of text, and for each result of a tool."""
    texts: list[str] = []
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(text(block, "text"))
            case "tool_result":
                if texts:
                    yield {"role": role, "content": BETWEEN.join(texts)}
                texts = []
                result = f"{place}.content[{number}].content"
                yield {
                    "role": "tool",
                    "tool_call_id": text(block, "tool_use_id"),
                    "content": joined(block.get("content"), result, TEXT, BETWEEN),
                }
            case kind:
                raise _unsupported(f"{place}.content[{number}]", kind)

    if texts or not blocks:
        yield {"role": role, "content": BETWEEN.join(texts)}


def _called(block: Object) -> Object:
    given = block.get("input")
    return {
        "id": text(block, "id"),
        "type": "function",
        "function": {"name": text(block, "name"), "arguments": {} if given is None else given},
    }


def _tools(body: Object) -> list[Object]:
    tools = members(body, "tools")
    if body.get("tool_choice") in NO_CHOICE:
        return []

    found: list[Object] = []
    for number, each in enumerate(tools):
        if each.get("type", "custom") not in ("custom", None):
            raise _unsupported(f"tools[{number}]", each["type"])
        found.append(tool(each, f"tools[{number}]", "input_schema"))
    return found


def _unsupported(place: str, kind: Any) -> Refused:
    return Refused(
        f"{place} has type {shown(kind)}, which is not supported: the policy reads text, and "
        "calls tools of type custom.",
        code="unsupported",
    )
