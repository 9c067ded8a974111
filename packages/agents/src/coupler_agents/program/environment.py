"""Let a program or a function play an episode, through the gateway."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, cast

from coupler import CouplerError, Environment, Outcome, Policy, Task, import_target
from coupler_agents.gateway import Gateway, Session, Talk
from coupler_agents.program.config import ProgramConfig
from coupler_agents.program.process import run


class ProgramEnvironment(Environment):
    """Episodes of an agent that speaks to an endpoint, each with a key of its own."""

    config: ProgramConfig

    def __init__(self, config: ProgramConfig) -> None:
        super().__init__(config)
        if bool(config.command) == bool(config.target):
            raise CouplerError(
                "environment=program needs one agent.\n"
                "  set:  environment.command=[PROGRAM,ARGUMENT] or environment.target=FILE.py:NAME"
            )
        self.uses_tools = config.uses_tools
        self.function = _function(config.target) if config.target else None
        self.gateway = Gateway()

    async def setup(self) -> None:
        """Start the gateway."""
        self.places = asyncio.Semaphore(self.config.concurrency)
        await self.gateway.start()

    async def close(self) -> None:
        """Stop the gateway."""
        await self.gateway.close()

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode. A failure that follows one of its limits is none."""
        conversation = cast(Talk, policy)

        async with self.places:
            session = self.gateway.open(conversation)
            try:
                return await self._play(task, session)
            except Exception:
                if session.failure:
                    raise session.failure from None
                if conversation.ended is None:
                    raise
                return Outcome()
            finally:
                self.gateway.end(session)

    async def _play(self, task: Task, session: Session) -> Outcome:
        row = {**task.row, "messages": list(task.messages)}
        if self.function:
            return Outcome(await self.function(row, session.base_url, session.api_key))

        return await run(self.config.command, row, session.environ, self.config.timeout_s)


def _function(target: str) -> Callable[..., Any]:
    found = import_target(target)
    if not inspect.iscoroutinefunction(found):
        raise CouplerError(f"environment.target={target} is no async function.")
    return found
