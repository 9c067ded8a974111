"""Exchange JSON between a run and a process that plays its episodes.

Nothing is unpickled, so that both sides may have different versions of everything but
core.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from coupler.interfaces import Completion, Ended, Outcome, Reply, Task

HEADER_BYTES = 8
MAX_BYTES = 1 << 30

Line = dict[str, Any]


class Wire:
    """One end of a socket. A message is its length in 8 bytes, and then JSON."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> Wire:
        """Take over one end of a connected socket."""
        return cls(*await asyncio.open_connection(sock=end))

    def post(self, line: Mapping[str, Any]) -> None:
        """Queue a message, so that it is sent soon.

        Raises:
            TypeError: JSON cannot write it.
        """
        body = json.dumps(line, default=_number).encode()
        self.writer.write(len(body).to_bytes(HEADER_BYTES, "big") + body)

    async def receive(self) -> Line | None:
        """Return the next message, or None when the other side has ended."""
        try:
            size = int.from_bytes(await self.reader.readexactly(HEADER_BYTES), "big")
            if size > MAX_BYTES:
                return None
            return json.loads(await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return None

    def close(self) -> None:
        """Close this end."""
        self.writer.close()


def _number(value: Any) -> Any:
    """Return a number of numpy or torch as one of Python."""
    if callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no JSON")


def task_to(task: Task) -> Line:
    return {"messages": list(task.messages), "row": task.row, "seed": task.seed}


def task_from(line: Line) -> Task:
    return Task(tuple(line["messages"]), line["row"], line["seed"])


def outcome_to(outcome: Outcome) -> Line:
    return asdict(outcome)


def outcome_from(line: Line) -> Outcome:
    found = {field.name: line[field.name] for field in fields(Outcome)}
    return Outcome(**{**found, "turn_rewards": tuple(found["turn_rewards"])})


def completion_to(done: Completion) -> Line:
    """Leave out routed experts and masks, which the run keeps."""
    return {
        "tokens": done.tokens,
        "logprobs": done.logprobs,
        "versions": done.versions,
        "finish": done.finish,
        "replica": done.replica,
    }


def completion_from(line: Line) -> Completion:
    tokens, logprobs, versions = (tuple(line[n]) for n in ("tokens", "logprobs", "versions"))
    return Completion(tokens, logprobs, versions, line["finish"], replica=line["replica"])


def reply_to(reply: Reply) -> Line:
    return {
        "message": reply.message,
        "finish": reply.finish,
        "ended": reply.ended,
        "usage": reply.usage,
        "completion": completion_to(reply.completion),
        "malformed": reply.malformed,
    }


def reply_from(line: Line) -> Reply:
    return Reply(
        line["message"],
        line["finish"],
        Ended(line["ended"]) if line["ended"] else None,
        (line["usage"][0], line["usage"][1]),
        completion_from(line["completion"]),
        line["malformed"],
    )
