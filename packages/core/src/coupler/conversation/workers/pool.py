"""Spread the episodes of an environment over processes of their own."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache, reduce

from coupler.conversation.workers.link import (
    START_S,
    FailedThere,
    Link,
    command,
    environment_of,
)
from coupler.errors import CouplerError
from coupler.interfaces import Environment, EnvironmentConfig, Outcome, Policy, Task
from coupler.system.plain import Section


def open_environment(
    config: EnvironmentConfig, load: Callable[[], type[Environment]]
) -> Environment:
    """Make the environment of a run: here, or in processes of its own.

    Args:
        load: imports its class, which processes of their own do themselves.

    Raises:
        CouplerError: it cannot be made.
    """
    if config.workers or config.python:
        return EnvironmentWorkers(config)
    return load()(config)


class EnvironmentWorkers(Environment):
    """Plays each episode in the process that has the fewest.

    A process that ended is replaced when the next episode begins. Its episodes, and
    those that wait for one that does not start, raise
    :class:`~coupler.conversation.workers.link.WorkerDied`.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        # A process must not start processes itself.
        self.section = Section.of(replace(config, workers=0, python=""))
        self.python = config.python
        self.uses_tools = uses_tools(self.python, self.section)
        self.links: list[Link] = []
        self.starting: dict[int, asyncio.Task[Link]] = {}

    async def setup(self) -> None:
        """Start all processes, and set the environment up in each."""
        count = max(1, self.config.workers)
        started = (self._started() for _ in range(count))
        found = await asyncio.gather(*started, return_exceptions=True)

        self.links = [link for link in found if isinstance(link, Link)]
        for error in found:
            if isinstance(error, BaseException):
                raise error

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode."""
        at = min(range(len(self.links)), key=lambda i: len(self.links[i].episodes))
        return await (await self._living(at)).episode(task, policy)

    async def close(self) -> None:
        """End the processes."""
        for task in self.starting.values():
            task.cancel()
        links, self.links = self.links, []
        await asyncio.gather(*(link.close() for link in links))

    async def _living(self, at: int) -> Link:
        """Return a process that lives. One that ended is replaced once."""
        if not self.links[at].died:
            return self.links[at]
        if at not in self.starting:
            self.starting[at] = asyncio.create_task(self._replaced(at))
        return await asyncio.shield(self.starting[at])

    async def _replaced(self, at: int) -> Link:
        try:
            await self.links[at].close()
            self.links[at] = await self._started()
            return self.links[at]
        finally:
            del self.starting[at]

    async def _started(self) -> Link:
        link = Link(self.python, self.section, self._read)
        await link.start()
        return link

    def _read(self, key: str) -> None:
        """Read an option here, too, because it was read there."""
        names = key.removeprefix(self.section.path).split(".")
        with suppress(AttributeError):
            reduce(getattr, names, self.config)


def uses_tools(python: str, section: Section) -> bool:
    """Ask the interpreter of an environment whether it offers tools.

    Raises:
        CouplerError: the environment cannot be made there.
    """
    return _uses_tools(python, json.dumps(asdict(section)))


@lru_cache(8)
def _uses_tools(python: str, section: str) -> bool:
    try:
        done = subprocess.run(
            command(python, "describe"),
            input=section.encode(),
            capture_output=True,
            timeout=START_S,
            env=environment_of(python),
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise FailedThere(f"environment.python={python} does not start: {error}") from None
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = done.stderr.decode(errors="replace").strip()[-2000:]
        raise FailedThere(f"the environment cannot be made in its process:\n{last}") from None

    if "refused" in said:
        raise CouplerError(said["refused"])
    return bool(said["uses_tools"])
