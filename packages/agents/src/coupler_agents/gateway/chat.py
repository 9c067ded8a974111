"""Speak OpenAI's Chat Completions."""

from __future__ import annotations

import time
from collections.abc import Iterator

from coupler.conversation import Reply
from coupler_agents.gateway.session import Session
from coupler_agents.gateway.wire import (
    MODEL,
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

ROLES = {"developer": "system", **{r: r for r in ("system", "user", "assistant", "tool")}}
PARTS = ("text", "refusal")
UNSUPPORTED = {
    "n": (1,),
    "logit_bias": (),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "functions": (),
    "function_call": ("auto", "none"),
    "prediction": (),
    "web_search_options": (),
    "chat_template_kwargs": (),
}
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    502: "server_error",
}


async def answer(session: Session, body: Object) -> Object | list[bytes]:
    """Sample a turn for a request.

    Raises:
        Refused: the request is wrong, or asks for what the gateway cannot do.
    """
    asked = read(body)
    logprobs = flag(body, "logprobs")
    usage = flag(member(body, "stream_options"), "include_usage")

    reply = await session.chat(asked)
    made = completion(asked, reply, logprobs)
    return list(chunks(made, usage)) if asked.stream else made


def read(body: Object) -> Asked:
    """Translate a request."""
    refuse(body, UNSUPPORTED)
    most = whole(body, "max_completion_tokens") or whole(body, "max_tokens")

    return Asked(
        body,
        [_message(each, f"messages[{i}]") for i, each in enumerate(members(body, "messages"))],
        read_tools(body),
        most,
        flag(body, "stream"),
        wishes(body),
    )


def read_tools(body: Object) -> list[Object]:
    """Return the tools of a request, none where ``tool_choice`` says none."""
    tools = members(body, "tools")
    if body.get("tool_choice") in NO_CHOICE:
        return []

    found: list[Object] = []
    for number, each in enumerate(tools):
        _only_functions(each, f"tools[{number}]")
        inner = member(each, "function")
        found.append(
            tool(
                inner,
                f"tools[{number}].function",
                "parameters",
            )
        )
    return found


def completion(asked: Asked, reply: Reply, logprobs: bool) -> Object:
    """Return the response of a turn."""
    said = Spoken.of(reply)
    message: Object = {
        "role": "assistant",
        "content": said.text or (None if said.calls else ""),
        "refusal": None,
    }
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [_call(call) for call in said.calls]

    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(reply) if logprobs else None,
        "finish_reason": _finish(reply, said),
    }
    fed, sampled = reply.usage
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": fed,
            "completion_tokens": sampled,
            "total_tokens": fed + sampled,
        },
    }


def chunks(made: Object, usage: bool) -> Iterator[bytes]:
    """Yield a response as the events of a stream."""
    (choice,) = made["choices"]
    message = choice["message"]
    head = {name: made[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"

    deltas: list[Object] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        if message.get(name):
            deltas.append({name: message[name]})
    for index, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    deltas.append({})

    for number, delta in enumerate(deltas, 1):
        last = number == len(deltas)
        part = {
            "index": 0,
            "delta": delta,
            "logprobs": choice["logprobs"] if last else None,
            "finish_reason": choice["finish_reason"] if last else None,
        }
        yield frame({**head, "choices": [part]})
    if usage:
        yield frame({**head, "choices": [], "usage": made["usage"]})
    yield b"data: [DONE]\n\n"


def error(status: int, code: str, sentence: str) -> Object:
    """Return an error in the shape of OpenAI."""
    return {
        "error": {
            "message": sentence,
            "type": KINDS.get(status, "invalid_request_error"),
            "param": None,
            "code": code,
        }
    }


async def models(_session: Session, _body: Object) -> Object:
    """List the one model that there is, in the shape of OpenAI and of Anthropic."""
    entry = {
        "id": MODEL,
        "object": "model",
        "created": 0,
        "owned_by": "coupler",
        "type": "model",
        "display_name": MODEL,
        "created_at": "1970-01-01T00:00:00Z",
    }

    return {
        "object": "list",
        "data": [entry],
        "has_more": False,
        "first_id": MODEL,
        "last_id": MODEL,
    }


def _message(body: Object, place: str) -> Object:
    role = text(body, "role")
    if role not in ROLES:
        raise Refused(f"{place} has role {shown(role)}. Set it to one of {', '.join(ROLES)}.")
    if len(body) == 2 and type(body.get("content")) is str:  # as most messages are
        return {"role": ROLES[role], "content": body["content"]}

    told: Object = {"role": ROLES[role], "content": _content(body, place)}
    for name in ("name", "tool_call_id"):
        if value := text(body, name):
            told[name] = value
    for name in ("reasoning_content", "reasoning"):
        if role == "assistant" and body.get(name):
            told[name] = text(body, name)
    if role == "assistant" and body.get("tool_calls"):
        told["tool_calls"] = members(body, "tool_calls")
        for number, call in enumerate(told["tool_calls"]):
            _only_functions(call, f"{place}.tool_calls[{number}]")
    return told


def _content(body: Object, place: str) -> str:
    content = joined(
        body.get("content"),
        f"{place}.content",
        PARTS,
    )
    return content or text(body, "refusal")


def _only_functions(body: Object, place: str) -> None:
    if body.get("type", "function") != "function":
        raise Refused(
            f"{place} has type {shown(body['type'])}, and only functions are supported.",
            code="unsupported",
        )


def _call(call: Call) -> Object:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish(reply: Reply, said: Spoken) -> str:
    if reply.finish != "stop":
        return "length"
    return "tool_calls" if said.calls else "stop"


def _logprobs(reply: Reply) -> Object:
    """Return the log-prob of every sampled token, named by its id as vLLM names it."""
    done = reply.completion
    content = [
        {
            "token": f"token_id:{token}",
            "logprob": logprob,
            "bytes": None,
            "top_logprobs": [],
        }
        for token, logprob in zip(done.tokens, done.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
