"""Hold a connection to an MCP server."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Mapping
from typing import IO, Any

import mcp
from mcp.client.stdio import stdio_client
from mcp.types import CONNECTION_CLOSED

from coupler import CouplerError
from coupler_agents.mcp.servers import Schema, Server
from coupler_agents.tools.calling import ToolLost

CLOSE_S = 10.0  # the library gives a program about half of it to end
MAX_PAGES = 100
SHOWN = 1_000  # characters of a program's last words
log = logging.getLogger(f"coupler.{__name__}")


class ToolError(Exception):
    """A tool says that it failed. The policy is told."""


class Session:
    """A connection to one server.

    A task of its own opens and closes it, since the library's scopes have to be left by
    the task that entered them.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.lost = False
        self._client: mcp.Client | None = None
        self._leave = asyncio.Event()
        self._opened: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the program or reach the address, and agree on a protocol.

        Raises:
            CouplerError: that failed, or took too long.
        """
        self._task = asyncio.create_task(self._hold())

        try:
            async with asyncio.timeout(self.server.start_timeout_s):
                self._client = await asyncio.shield(self._opened)
        except TimeoutError:
            await self.close()
            raise CouplerError(
                f"the server of {self.server.key} did not answer within "
                f"{self.server.start_timeout_s:g} seconds.\n"
                f"  set:  {self.server.key}.start_timeout_s"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def _hold(self) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
            transport = self._transport(said)

            try:
                async with mcp.Client(transport, cache=None) as client:
                    self._opened.set_result(client)
                    await self._leave.wait()

            except (Exception, asyncio.CancelledError) as error:
                if self._opened.done():
                    log.debug("%s: %r on the way out", self.server.key, error)
                    return
                self._opened.set_exception(self._not_started(error, said))
                # without a reader, the event loop would print it
                self._opened.exception()

    def _transport(self, said: IO[str]) -> Any:
        if self.server.url:
            return self.server.url
        program, *arguments = self.server.command
        env = dict(self.server.env)
        parameters = mcp.StdioServerParameters(command=program, args=arguments, env=env)
        return stdio_client(parameters, errlog=said)  # type: ignore[arg-type]

    def _not_started(self, error: BaseException, said: IO[str]) -> CouplerError:
        said.seek(0)
        words = said.read().strip()[-SHOWN:]
        target = self.server.url or " ".join(self.server.command)
        return CouplerError(
            f"the server of {self.server.key} cannot be reached: {_first(error)}\n"
            f"  it is:  {target}" + (f"\n  it said:  {words}" if words else "")
        )

    async def tools(self) -> list[Schema]:
        """Return all tools of the server, as OpenAI's ``tools`` have them.

        Raises:
            ToolLost: the server went away, or does not answer.
        """
        assert self._client
        found: list[Schema] = []
        cursor: str | None = None

        try:
            async with asyncio.timeout(self.server.start_timeout_s):
                for _ in range(MAX_PAGES):
                    page = await self._client.list_tools(cursor=cursor)
                    found += [_schema(tool) for tool in page.tools]
                    cursor = page.next_cursor
                    if not cursor:
                        return found
        except Exception as error:
            raise self._gone(error) from error
        raise CouplerError(
            f"the server of {self.server.key} has more than {MAX_PAGES} pages of tools."
        )

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool says.

        Raises:
            ToolError: the tool or the server says that it failed.
            ToolLost: the server went away.
        """
        assert self._client
        try:
            result = await self._client.call_tool(name, dict(arguments))
        except mcp.MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise self._gone(error) from error
            raise ToolError(error.error.message) from None

        if result.is_error:
            raise ToolError(_text(result))
        return _text(result)

    def _gone(self, error: BaseException) -> ToolLost:
        self.lost = True
        return ToolLost(f"the server of {self.server.key} went away: {_first(error)}")

    async def close(self) -> None:
        """Close the connection, and end the program."""
        if self._task is None:
            return
        self._leave.set()
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=CLOSE_S)


def _first(error: BaseException) -> str:
    """Return the words of an error, or of the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _schema(tool: Any) -> Schema:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _text(result: Any) -> str:
    """Return the texts of a result. A policy of text is shown nothing else."""
    texts = [
        block.text if block.type == "text" else f"[{block.type}, which is not shown]"
        for block in result.content
    ]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(texts)
