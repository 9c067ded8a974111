"""An MCP server of the tests, over its standard streams or at a port."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("played")
counted = 0


@server.tool()
def plus(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """Count the calls of this session."""
    global counted
    counted += 1
    return f"call {counted}"


@server.tool()
def fails(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@server.tool()
def sleeps(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def dies() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def changes() -> str:
    """Give the server one more tool."""

    def more() -> str:
        """Do more."""
        return "more"

    server.add_tool(more)
    return "changed"


if __name__ == "__main__":
    if sys.argv[1:] == ["broken"]:
        raise SystemExit("the server has no licence")
    if sys.argv[1:] == ["silent"]:
        time.sleep(60)
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    server.run()
