"""Hold one process that plays episodes, and answer what its episodes ask for."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coupler.conversation.limits import ConversationOver
from coupler.conversation.workers.wire import (
    Line,
    Wire,
    completion_to,
    outcome_from,
    reply_to,
    task_to,
)
from coupler.errors import CouplerError
from coupler.interfaces import Ended, Outcome, Task
from coupler.system import supervisor
from coupler.system.plain import Section

START_S = 120.0  # to import the environment, and to set it up
CLOSE_S = 10.0  # to end what setup started
LEAVE_S = 8.0  # for a cancelled episode to give back what it holds
MAIN = "coupler.conversation.workers.main"
# of our own interpreter
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class WorkerDied(CouplerError):
    """The process of an episode ended, or did not start. All of its episodes raise the
    same one.

    Attributes:
        counted: it was counted as a failure, which it is once.
    """

    counted = False


class FailedThere(CouplerError):
    """An episode failed in its process, whose traceback is the text."""


def command(python: str, *words: str) -> list[str]:
    """Return the command of a process that plays episodes."""
    return [python or sys.executable, "-m", MAIN, *words]


def environment_of(python: str) -> dict[str, str]:
    """Return the variables of such a process: ours, but for what points another
    interpreter at our packages.
    """
    if python:
        kept = {name: value for name, value in os.environ.items() if name not in OURS}
        return kept | {"PYTHONNOUSERSITE": "1"}
    path = os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": path}


@dataclass(slots=True, eq=False)
class _Episode:
    """An episode under way, and the tasks that sample for it."""

    policy: Any
    future: asyncio.Future[Line]
    asked: set[asyncio.Task[None]] = field(default_factory=set)


class Link:
    """One process, under a supervisor that ends all that it started.

    Args:
        python: its interpreter, or nothing for ours.
        read: called with the name of each option that was read there.
    """

    def __init__(self, python: str, section: Section, read: Any) -> None:
        self.python, self.section, self.read = python, section, read
        self.episodes: dict[int, _Episode] = {}
        # cancelled here, and not ended there yet
        self.leaving: dict[int, asyncio.Future[None]] = {}
        self.begun = 0
        self.died: WorkerDied | None = None
        self.reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, and set the environment up in it.

        Raises:
            WorkerDied: it cannot be set up.
        """
        ours, theirs = socket.socketpair()
        self.control, control = socket.socketpair()
        with theirs, control:
            fds = (theirs.fileno(), control.fileno())
            self.process = subprocess.Popen(
                [*supervisor.watched(fds[1]), *command(self.python, str(fds[0]))],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=environment_of(self.python),
                start_new_session=True,
            )
        self.wire = await Wire.open(ours)
        self.wire.post(asdict(self.section))

        try:
            async with asyncio.timeout(START_S):
                first = await self.wire.receive()
        except TimeoutError:
            first = {"failed": f"it was not set up within {START_S:.0f} s"}
        if not first or "failed" in first:
            why = first["failed"] if first else f"its process {await self._ending()}"
            await self.close()
            raise WorkerDied(f"the environment cannot be set up: {why}")
        self.reading = asyncio.create_task(self._serve())

    async def episode(self, task: Task, policy: Any) -> Outcome:
        """Play one episode there. One that is cancelled has ended there, too.

        Raises:
            ConversationOver: the episode let it pass.
            FailedThere: it raised.
            WorkerDied: the process ended.
        """
        if self.died:
            raise self.died
        self.begun += 1
        number = self.begun
        episode = _Episode(policy, asyncio.get_running_loop().create_future())
        self.episodes[number] = episode

        try:
            self.wire.post({"episode": number, "task": task_to(task)})
            said = await episode.future
        finally:
            del self.episodes[number]
            for asked in episode.asked:
                asked.cancel()
            if episode.future.cancelled() and not self.died:
                await self._cancel(number)

        for name in said["reads"]:
            self.read(name)
        if over := said.get("over"):
            raise ConversationOver(Ended(over))
        if "failed" in said:
            raise FailedThere(said["failed"])
        return outcome_from(said["outcome"])

    async def _cancel(self, number: int) -> None:
        """Cancel an episode there, and wait until it has ended."""
        self.wire.post({"episode": number, "cancel": True})
        left = self.leaving[number] = asyncio.get_running_loop().create_future()

        await asyncio.wait({left}, timeout=LEAVE_S)
        del self.leaving[number]

    async def close(self) -> None:
        """End the process, after it has closed its environment."""
        self.wire.close()
        loop = asyncio.get_running_loop()

        try:
            await loop.run_in_executor(None, self.process.wait, CLOSE_S)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)
            await loop.run_in_executor(None, self.process.wait)
        if self.reading:
            await self.reading
        self.control.close()

    async def _serve(self) -> None:
        """Answer until the process ends."""
        while line := await self.wire.receive():
            # a process that fails as it ends says so, of no episode
            episode = self.episodes.get(line.get("episode", 0))
            if not episode:
                self._late(line)
            elif "ask" in line:
                task = asyncio.create_task(self._answer(episode, line))
                episode.asked.add(task)
                task.add_done_callback(episode.asked.discard)
            elif "ended" in line:
                episode.policy.end(Ended(line["ended"]))
            elif not episode.future.done():
                episode.future.set_result(line)

        how = await self._ending()
        self.died = WorkerDied(f"the process of the episode {how}")
        self._left(*self.leaving)
        for episode in self.episodes.values():
            if not episode.future.done():
                episode.future.set_exception(self.died)

    def _late(self, line: Line) -> None:
        """Answer a request of an episode that was cancelled, or take its end."""
        if "ask" in line:
            self.wire.post({"episode": 0, "call": line["call"], "over": Ended.CUT})
        elif "ended" not in line:
            self._left(line.get("episode", 0))

    def _left(self, *numbers: int) -> None:
        for number in numbers:
            if number in self.leaving and not self.leaving[number].done():
                self.leaving[number].set_result(None)

    async def _answer(self, episode: _Episode, line: Line) -> None:
        said: Mapping[str, Any]
        try:
            said = {"answer": await _asked(episode.policy, line["ask"], line["given"])}
        except ConversationOver as over:
            said = {"over": over.ended}
        except Exception as error:  # the episode is told, and the run knows of it
            said = {"refused": str(error)}
        self.wire.post({"episode": 0, "call": line["call"], **said})

    async def _ending(self) -> str:
        """Return how the process ended, as its supervisor says."""
        loop = asyncio.get_running_loop()
        self.control.settimeout(START_S)
        try:
            said = await loop.run_in_executor(None, self.control.recv, 4096)
            return str(json.loads(said)["how"])
        except (OSError, ValueError, LookupError, TypeError):
            return "was killed together with what watches it"


async def _asked(policy: Any, what: str, given: Line) -> Any:
    """Have the policy of an episode do something."""

    if what == "chat":
        wishes = {"wishes": given["wishes"]} if given["wishes"] else {}
        reply = await policy.chat(
            given["messages"], given["tools"], max_tokens=given["max_tokens"], **wishes
        )
        return reply_to(reply)
    if what == "count":
        return await policy.count(given["messages"], given["tools"])
    return completion_to(await policy.sample(tuple(given["ids"]), given["max_tokens"]))
