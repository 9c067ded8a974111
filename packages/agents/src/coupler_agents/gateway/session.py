"""Hold one episode behind the gateway: its key, its conversation, its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from coupler.conversation import Ended, Message, Reply
from coupler.interfaces import Completion
from coupler_agents.gateway.wire import Asked, Refused


class Talk(Protocol):
    """A conversation, in this process or in that of the run.

    See :class:`coupler.conversation.Conversation`.
    """

    ended: Ended | None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        max_tokens: int | None = None,
        wishes: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Sample the answer to messages."""
        ...

    async def count(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
    ) -> int:
        """Return how many tokens :meth:`chat` would feed."""
        ...

    async def sample(
        self,
        ids: tuple[int, ...],
        max_tokens: int | None = None,
    ) -> Completion:
        """Sample after ids."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a gateway.

    Attributes:
        body: bytes of a request.
        in_flight: requests of one session at a time.
        connections: open connections of all sessions.
        receive_seconds: time for the body of a request.
        send_seconds: time for a client to take an answer.
        idle_seconds: time for a connection without a whole request.
        ping_seconds: time between two pings in a stream whose turn is being sampled.
    """

    body: int = 64 << 20
    in_flight: int = 32
    connections: int = 16384
    receive_seconds: float = 60.0
    send_seconds: float = 60.0
    idle_seconds: float = 120.0
    ping_seconds: float = 10.0


@dataclass(slots=True, eq=False)
class Session:
    """The way to one conversation, until it is ended.

    Attributes:
        url: address of the gateway, without a path.
        api_key: the key of this episode alone.
        keys: every key of this episode.
        failure: the first error that was not the caller's, of the rollout for example.
        told: messages up to each answer of the Responses dialect, by its id.
    """

    conversation: Talk
    url: str
    api_key: str = field(repr=False)
    keys: list[str] = field(default_factory=list, repr=False)
    failure: BaseException | None = None
    told: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)
    _running: set[asyncio.Timeout] = field(default_factory=set, repr=False)

    @property
    def base_url(self) -> str:
        """Return the address that clients of OpenAI take. Those of Anthropic take
        ``url``.
        """
        return f"{self.url}/v1"

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables that point clients of OpenAI and Anthropic here."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    async def chat(self, asked: Asked) -> Reply:
        """Sample a turn. See :meth:`coupler.conversation.Conversation.chat`."""
        return await self.conversation.chat(
            asked.messages,
            asked.tools,
            max_tokens=asked.max_tokens,
            wishes=asked.wishes,
        )

    async def sample(self, ids: tuple[int, ...], max_tokens: int | None) -> Completion:
        """Sample after ids. See :meth:`coupler.conversation.Conversation.sample`."""
        return await self.conversation.sample(ids, max_tokens)

    @contextmanager
    def scope(self, at_once: int) -> Iterator[asyncio.Timeout]:
        """Count a request while it runs. Its scope expires when the session ends.

        Raises:
            Refused: as many as ``at_once`` run already.
        """
        if len(self._running) >= at_once:
            raise Refused(
                f"{at_once} requests of this session are running. Wait for one of them.",
                429,
                "too_many_requests",
            )
        running = asyncio.timeout(None)
        self._running.add(running)

        try:
            yield running
        finally:
            self._running.discard(running)

    def end(self) -> None:
        """Stop the requests that still run. The gateway calls this."""
        for running in self._running:
            running.reschedule(asyncio.get_running_loop().time())
