"""Look at how much of a prompt SGLang found in its prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cached_tokens(rollout: Any) -> Iterator[list[int]]:
    """Append the cached tokens of each request that is made meanwhile."""
    found: list[int] = []
    call = rollout.link.call

    async def watched(name: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = await call(name, body)
        if name == "generate":
            found.append(answer["meta_info"]["cached_tokens"])
        return status, answer

    rollout.link.call = watched
    try:
        yield found
    finally:
        rollout.link.call = call
