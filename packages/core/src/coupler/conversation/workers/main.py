"""Be a process that plays episodes of one environment.

``python -m coupler.conversation.workers.main SOCKET`` is started by the run. With
``describe`` in place of the socket it says what the run must know of the environment
before it starts.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from coupler.conversation.limits import ConversationOver
from coupler.conversation.workers.wire import (
    Line,
    Wire,
    completion_from,
    outcome_to,
    reply_from,
    task_from,
)
from coupler.errors import CouplerError
from coupler.executors.classes import load_class
from coupler.interfaces import Completion, Ended, Environment, Message, Outcome, Reply
from coupler.plugins.manager import Plugins
from coupler.system.plain import RECEIVED, Section


def make(section: Line) -> Environment:
    """Make the environment of a section of the configuration.

    Raises:
        CouplerError: it cannot be made.
    """
    config = Section(**section).open()
    return load_class(Plugins.load(), "environment", config.name)(config)


class RemotePolicy:
    """The policy of an episode, which is in the process of the run."""

    def __init__(self, worker: Worker, episode: int) -> None:
        self.worker, self.episode = worker, episode
        self.ended: Ended | None = None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        max_tokens: int | None = None,
        wishes: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Sample the answer to messages."""
        given = {
            "messages": list(messages),
            "tools": list(tools),
            "max_tokens": max_tokens,
            "wishes": wishes,
        }
        reply = reply_from(await self._ask("chat", given))
        self.ended = self.ended or reply.ended
        return reply

    async def count(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
    ) -> int:
        """Return how many tokens :meth:`chat` would feed."""
        return await self._ask("count", {"messages": list(messages), "tools": list(tools)})

    async def sample(
        self,
        ids: tuple[int, ...],
        max_tokens: int | None = None,
    ) -> Completion:
        """Sample after ids."""
        given = {"ids": list(ids), "max_tokens": max_tokens}
        return completion_from(await self._ask("sample", given))

    def end(self, ended: Ended) -> None:
        """Say how the episode ended."""
        self.ended = self.ended or ended
        self.worker.wire.post({"episode": self.episode, "ended": ended})

    async def _ask(self, what: str, given: Line) -> Any:
        said = await self.worker.ask({"episode": self.episode, "ask": what, "given": given})

        if over := said.get("over"):
            self.ended = self.ended or Ended(over)
            raise ConversationOver(Ended(over))
        if "refused" in said:
            raise CouplerError(said["refused"])
        return said["answer"]


class Worker:
    """Plays the episodes that the run sends, any number at once."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.episodes: dict[int, asyncio.Task[None]] = {}
        self.waiting: dict[int, asyncio.Future[Line]] = {}
        self.asked = 0
        self.told: set[str] = set()

    async def serve(self) -> None:
        """Set the environment up, and play until the run ends this."""
        first = await self.wire.receive()
        if not first:
            return

        environment = None
        try:
            environment = make(first)
            await environment.setup()
            self.wire.post({"ready": True})
            await self._play(environment)
        except (Exception, SystemExit) as error:
            self.wire.post({"failed": _words(error)})
        finally:
            if environment:
                await environment.close()
            await self.wire.writer.drain()

    async def _play(self, environment: Environment) -> None:
        while line := await self.wire.receive():
            number = line["episode"]
            if "task" in line:
                task = asyncio.create_task(self._episode(environment, line))
                self.episodes[number] = task
                # A cancelled task that has not begun would never say that it ended.
                await asyncio.sleep(0)
            elif "cancel" in line and number in self.episodes:
                self.episodes[number].cancel()
            elif "call" in line and line["call"] in self.waiting:
                self.waiting.pop(line["call"]).set_result(line)

        for task in self.episodes.values():
            task.cancel()
        await asyncio.gather(*self.episodes.values(), return_exceptions=True)

    async def _episode(self, environment: Environment, line: Line) -> None:
        number = line["episode"]

        try:
            self._tell(number, await self._outcome(environment, line))
        except TypeError as error:
            self._tell(number, {"failed": _words(error)})
        finally:
            del self.episodes[number]

    async def _outcome(self, environment: Environment, line: Line) -> Line:
        """Play an episode, and say how it went."""
        policy = RemotePolicy(self, line["episode"])

        try:
            outcome = await environment.episode(task_from(line["task"]), policy)
            if isinstance(outcome, Outcome):
                return {"outcome": outcome_to(outcome)}
            return {"failed": f"episode() returned a {type(outcome).__name__}, not an Outcome"}
        except ConversationOver as over:
            return {"over": over.ended}
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return {"failed": _words(error)}

    def _tell(self, number: int, said: Line) -> None:
        """Say how an episode went, and which options were read by now."""
        new = RECEIVED.keys - self.told
        self.wire.post({"episode": number, **said, "reads": sorted(new)})
        self.told |= new

    async def ask(self, line: Line) -> Line:
        """Ask the run for something, and wait for its answer."""
        self.asked += 1
        call = self.asked
        future = asyncio.get_running_loop().create_future()
        self.waiting[call] = future

        try:
            self.wire.post({**line, "call": call})
            return await future
        finally:
            self.waiting.pop(call, None)


def _words(error: BaseException) -> str:
    """Return a failure as text. One of Coupler's own needs no traceback."""
    if type(error) is CouplerError:
        return str(error)
    return "".join(traceback.format_exception(error))


def describe() -> None:
    """Read a section from stdin, and print what the run must know of it."""
    answer, sys.stdout = sys.stdout, sys.stderr
    try:
        said: Line = {"uses_tools": make(json.load(sys.stdin)).uses_tools}
    except CouplerError as error:
        said = {"refused": str(error)}
    print(json.dumps(said), file=answer)


async def _serve(descriptor: int) -> None:
    await Worker(await Wire.open(socket.socket(fileno=descriptor))).serve()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    if sys.argv[1] == "describe":
        describe()
    else:
        asyncio.run(_serve(int(sys.argv[1])))
