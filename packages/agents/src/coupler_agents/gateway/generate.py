"""Speak token ids, in the shape of vLLM's generate endpoint."""

from __future__ import annotations

from typing import Any

from coupler_agents.gateway.session import Session
from coupler_agents.gateway.wire import (
    Object,
    Refused,
    flag,
    kind,
    member,
    new_id,
    refuse,
    text,
    whole,
)

MAX_ID = 2**31
UNSUPPORTED = {"n": (1,), "logit_bias": (), "prompt_logprobs": (), "best_of": (1,)}


async def answer(session: Session, body: Object) -> Object:
    """Sample after ids, and return ids with log-probs and versions.

    Raises:
        Refused: the request is wrong, or asks for what the gateway cannot do.
    """
    sampling = member(body, "sampling_params")
    refuse(sampling, UNSUPPORTED)
    if flag(body, "stream"):
        raise Refused("stream=true is not supported for token ids. Leave it out.")
    ids = _ids(body.get("token_ids"))

    done = await session.sample(ids, whole(sampling, "max_tokens"))
    pairs = zip(done.tokens, done.logprobs, strict=True)
    choice = {
        "index": 0,
        "finish_reason": "length" if done.finish == "abort" else done.finish,
        "token_ids": done.tokens,
        "logprobs": {"content": [_logprob(id, value) for id, value in pairs]},
        "versions": done.versions,
    }
    return {
        "request_id": text(body, "request_id") or new_id("generate-"),
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(ids),
            "completion_tokens": len(done.tokens),
            "total_tokens": len(ids) + len(done.tokens),
        },
    }


def _logprob(token: int, value: float) -> Object:
    """Name a token as vLLM does where it returns ids in place of texts."""
    return {"token": f"token_id:{token}", "token_id": token, "logprob": value}


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise Refused(f"token_ids must be a list of token ids, and it is {kind(value)}.")
    for each in value:
        if type(each) is not int or not 0 <= each < MAX_ID:
            raise Refused(f"token_ids holds {each!r:.40}, which is no token id.")
    return tuple(value)
