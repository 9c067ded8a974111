"""Offer the tools of MCP servers to episodes, and see that they stay the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from coupler import CouplerError
from coupler_agents.mcp.servers import (
    Schema,
    Server,
    check_pin,
    check_same,
    chosen,
    hash_of,
    read_servers,
)

Call = Callable[..., Awaitable[str]]
log = logging.getLogger(f"coupler.{__name__}")


class McpTools:
    """The tools of all servers of a run.

    They are listed at the start, and again when an episode begins. Where they changed,
    the episode is refused.

    Raises:
        ConfigError: an entry of ``environment.mcp`` is wrong.
        CouplerError: the library is missing.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.servers = read_servers(entries)
        self.seen: dict[str, list[Schema]] = {}
        self._all: list[Any] = []
        self._shared: dict[str, Any] = {}
        self._one: dict[str, asyncio.Lock] = {}
        if self.servers:
            _check_library()

    def __bool__(self) -> bool:
        return bool(self.servers)

    @property
    def schemas(self) -> Sequence[Schema]:
        """The tools of all servers, which are known after :meth:`setup`."""
        return [schema for schemas in self.seen.values() for schema in schemas]

    async def setup(self) -> None:
        """List the tools of every server, and compare them with what is pinned.

        Raises:
            CouplerError: a server cannot be reached, or has other tools.
        """
        self._one = {server.name: asyncio.Lock() for server in self.servers}
        for server in self.servers:
            async with AsyncExitStack() as held:
                session = await self._session(server, held)
                tools = chosen(server, await session.tools())

            check_pin(server, tools)
            self.seen[server.name] = tools
            names = ", ".join(schema["function"]["name"] for schema in tools)
            log.info("%s has %s, sha256=%s", server.key, names, hash_of(tools))

    async def begin(self, held: AsyncExitStack) -> dict[str, Call]:
        """Return the tools of an episode by name.

        Args:
            held: closes the sessions of this episode.

        Raises:
            ToolsChanged: a server has other tools than at the start.
            CouplerError: a server cannot be reached.
        """
        tools: dict[str, Call] = {}

        for server in self.servers:
            session = await self._session(server, held)
            now = chosen(server, await session.tools())
            check_same(server, self.seen[server.name], now)
            names = [schema["function"]["name"] for schema in now]
            tools |= {name: _call(session, name) for name in names}
        return tools

    async def _session(self, server: Server, held: AsyncExitStack) -> Any:
        """Open a session, or return that of the run. A lost one is opened anew."""
        if server.session == "episode":
            session = self._made(server)
            held.push_async_callback(self._leave, session)
            await session.open()
            return session

        async with self._one[server.name]:
            found = self._shared.pop(server.name, None)
            if found and found.lost:
                await self._leave(found)
                found = None
            if not found:
                found = self._made(server)
                await found.open()
            self._shared[server.name] = found
        return found

    def _made(self, server: Server) -> Any:
        from coupler_agents.mcp.session import Session

        session = Session(server)
        self._all.append(session)
        return session

    async def _leave(self, session: Any) -> None:
        await session.close()
        if session in self._all:
            self._all.remove(session)

    async def close(self) -> None:
        """Close every session. An episode that is cancelled just now may hold one."""
        await asyncio.gather(*(self._leave(session) for session in list(self._all)))
        self._shared.clear()


def _call(session: Any, name: str) -> Call:
    async def call(**arguments: Any) -> str:
        return await session.call(name, arguments)

    return call


def _check_library() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise CouplerError(
            "environment.mcp needs the mcp library.\n  install:  pip install 'coupler-agents[mcp]'"
        ) from None
