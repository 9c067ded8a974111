"""Check the sandbox of programs for ``coupler doctor``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from coupler.errors import CouplerError
from coupler.plugins.finding import Finding, from_error, ok, problem, warning
from coupler.rewards.sandbox import version
from coupler_agents.sandbox.fusion import run_at
from coupler_agents.sandbox.sandbox import Sandbox
from coupler_agents.tools.config import ToolsConfig
from coupler_agents.tools.python import FIX, PythonTool

NAME = "python tool"
SERVER_FIX = "start the server, or name another address"
ASK, SAYS, SECONDS = "print(6 * 7)", "42", 10.0


def findings(config: ToolsConfig) -> Iterator[Finding]:
    """Run a program, and say where and how it ran."""
    try:
        tool = PythonTool(config)
        if not tool.url:
            yield asyncio.run(_here(tool))
            return
        ran = run_at(tool.url, ASK, SECONDS, {}, "", (), tool.limits)
    except CouplerError as error:
        yield from_error(NAME, error, SERVER_FIX if config.sandbox_url else FIX)
        return

    if ran.stdout.strip() == SAYS:
        yield ok(NAME, f"{tool.url} runs programs, each alone")
    else:
        yield problem(NAME, f"{tool.url} runs a program, and says {ran.stdout!r}", SERVER_FIX)


async def _here(tool: PythonTool) -> Finding:
    sandbox = Sandbox(tool.limits)
    await sandbox.start()
    try:
        interpreter = await sandbox.interpreter(apart=True)
        ran = await interpreter.run(ASK, SECONDS, {}, "")
    finally:
        await sandbox.close()

    if ran.stdout.strip() != SAYS:
        return problem(NAME, f"{version()} runs a program, and it ended with {ran}", FIX)
    if sandbox.separate:
        return ok(NAME, f"{version()}, with namespaces for each interpreter")
    return warning(
        NAME,
        f"{version()}, without namespaces inside: each interpreter starts one, which is slow",
    )
