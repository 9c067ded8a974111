"""OnRay: the executor with one actor per engine rank and per rollout replica."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coupler.config.schema import Devices, RayConfig
from coupler.errors import (
    CouplerError,
    PlacementError,
    ReplicaDied,
    WaitTimeout,
    WorkerDied,
    WorkerFailed,
)
from coupler.executors.environment import forwarded, of_ray
from coupler.executors.handle import Handle
from coupler.executors.host import Failure, Host, Place
from coupler.executors.placement import ROLLOUTS, Role, make_shares, shortage
from coupler.executors.ray import cluster
from coupler.executors.ray.own import OwnCluster
from coupler.executors.waits import Waits
from coupler.interfaces import Rank
from coupler.system.imports import Late
from coupler.system.log import PLAIN, get_logger
from coupler.system.processes import Process

if TYPE_CHECKING:
    import ray
    import ray.exceptions
else:
    ray = Late("ray", "coupler-core[ray]")

log = get_logger(__name__)

# an actor is asked again so often whether it lives; its death shows at once
WATCH_S, MIN_WATCH_S = 10.0, 0.5
# what a run before this one held may take so long to be free again
FREE_S = 10.0
CLOSE_S = 3.0
# log lines in an error
TAIL = 30


@dataclass(frozen=True, slots=True)
class Recipe:
    """The arguments that a worker was made from."""

    build: str
    spec: Any
    python: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One of the calls that travel together."""

    method: str
    args: tuple[Any, ...]
    answer: asyncio.Future[Any]


class OnRay:
    """Keeps every worker in an actor, so that roles overlap."""

    def __init__(self, config: RayConfig, waits: Waits, logs: Path) -> None:
        self.config, self.waits, self.logs = config, waits, logs
        self.own: OwnCluster | None = None
        self.group: Any = None
        self.slots: dict[str, list[cluster.Slot]] = {}
        self.handles: list[Handle] = []
        self.recipes: dict[Handle, Recipe] = {}

        # the limit of a silence, after which it is asked whether a process is stopped
        self.watch_s = min(WATCH_S, max(waits.heartbeat_s, MIN_WATCH_S))
        # replicas whose actor died
        self.lost: set[Handle] = set()
        self.starting: dict[Handle, Any] = {}
        self.places: dict[Handle, Place] = {}
        self.watches: list[asyncio.Task[None]] = []
        self.shown: dict[str, list[str]] = {}
        # calls of this turn of the event loop
        self.unsent: dict[Handle, list[Call]] = {}
        self.streams: set[asyncio.Task[None]] = set()

    async def place(self, roles: Sequence[Role]) -> None:
        """Start or join the cluster, check that it has room, and take it.

        Raises:
            PlacementError: there is no cluster, or it is too small.
        """
        self.death: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.death.add_done_callback(lambda future: future.cancelled() or future.exception())

        shares, each = make_shares(roles, self.config.placement), self.config.num_cpus_per_worker
        needed = sum(int(share.bundle(each, False)["CPU"]) * share.num_bundles for share in shares)
        with of_ray(starts=not self.config.address):
            self.own = cluster.connect(self.config, needed, self.watch_s)

        gpus = self.config.devices is Devices.GPU
        if self.config.devices is Devices.AUTO:
            gpus = any(node.total.get("GPU") for node in cluster.nodes())

        end = asyncio.get_running_loop().time() + FREE_S
        while lack := shortage(shares, each, gpus, nodes := cluster.nodes()):
            hopeless = shortage(
                shares, each, gpus, [replace(node, free=node.total) for node in nodes]
            )
            if hopeless or asyncio.get_running_loop().time() > end:
                raise PlacementError(lack)
            await asyncio.sleep(0.2)

        self.group = cluster.take(shares, each, gpus)
        self.slots = cluster.slots(self.group, shares, gpus)

    def spawn(self, role: str, index: int, build: str, spec: Any, python: str = "") -> Handle:
        slot = self.slots[role][index]
        environment = forwarded(os.environ, bool(python), slot.devices)
        if role not in self.shown:
            same = [
                f"that of {known}"
                for known, names in self.shown.items()
                if names == sorted(environment)
            ]
            self.shown[role] = sorted(environment)
            listed = (same or [" ".join(sorted(environment))])[0]
            log.info(f"{role}: {python or 'our interpreter'}, environment: {listed}", extra=PLAIN)

        interpreter = {"py_executable": python} if python else {}
        runtime_env = {"env_vars": environment, **interpreter}
        host = cluster.create(Host, self.group, slot, self.config.num_cpus_per_worker, runtime_env)
        actor = host.remote(self._log(role, index), Path.cwd(), slot.node)

        handle = Handle(role, index, actor)
        self.handles.append(handle)
        self.recipes[handle] = Recipe(build, spec, python)
        self.starting[handle] = actor.start.remote(build, spec)
        return handle

    async def locate(self, handles: Sequence[Handle], ranks: Sequence[Rank]) -> list[Rank]:
        if new := [handle for handle in handles if handle in self.starting]:
            await self._started(new)
        places = [self.places[handle] for handle in handles]
        rendezvous = f"{places[0].node}:{places[0].port}" if len(handles) > 1 else ""
        slots = self.slots[handles[0].role]
        return [
            replace(rank, rendezvous=rendezvous, node=slot.node, devices=slot.devices)
            for rank, slot in zip(ranks, slots, strict=True)
        ]

    async def _started(self, handles: Sequence[Handle]) -> None:
        places: list[Place] = await self._gather(
            handles, "start", [self.starting.pop(handle) for handle in handles]
        )
        self.places |= dict(zip(handles, places, strict=True))
        self.watches += [asyncio.create_task(self._watch(handle)) for handle in handles]

    async def revive(self, handle: Handle) -> Handle:
        if handle not in self.lost:
            return handle

        # it may only have been out of reach
        ray.kill(handle.of)
        self.handles.remove(handle)
        self.lost.discard(handle)

        # the new actor gets the bundle of the old one
        recipe = self.recipes.pop(handle)
        again = self.spawn(handle.role, handle.index, recipe.build, recipe.spec, recipe.python)
        await self._started([again])
        return again

    def put(self, value: Any) -> Any:
        return ray.put(value)

    async def each(
        self,
        handles: Sequence[Handle],
        method: str,
        arguments: Iterable[tuple[Any, ...]],
        *,
        aside: bool = False,
    ) -> list[Any]:
        refs = [
            handle.of.call.remote(method, *args)
            for handle, args in zip(handles, arguments, strict=True)
        ]
        return await self._gather(handles, method, refs)

    async def call(self, handle: Handle, method: str, *args: Any) -> Any:
        # calls of one turn of the event loop travel as one message
        if handle not in self.unsent:
            self.unsent[handle] = []
            asyncio.get_running_loop().call_soon(self._send, handle)

        call = Call(method, args, asyncio.get_running_loop().create_future())
        self.unsent[handle].append(call)
        return (await self._wait([handle], method, [call.answer]))[0]

    def _send(self, handle: Handle) -> None:
        calls = self.unsent.pop(handle)
        answers = handle.of.stream.options(num_returns="streaming").remote(
            [(call.method, call.args) for call in calls]
        )
        task = asyncio.create_task(self._distribute(handle, calls, answers))
        self.streams.add(task)
        task.add_done_callback(self.streams.discard)

    async def _distribute(self, handle: Handle, calls: list[Call], answers: Any) -> None:
        try:
            async for ref in answers:
                number, answer = await ref
                call = calls[number]
                # the caller of one that is done was cancelled
                if call.answer.done():
                    continue

                if isinstance(answer, Failure):
                    call.answer.set_exception(self._failed(handle, call.method, answer))
                else:
                    call.answer.set_result(answer)
        except ray.exceptions.RayError as error:
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(self._lost(handle, call.method, error))

    async def reads(self) -> set[str]:
        living = [handle for handle in self.handles if handle not in self.lost]
        return set().union(
            *await self._gather(living, "reads", [handle.of.reads.remote() for handle in living])
        )

    async def _gather(
        self, handles: Sequence[Handle], method: str, refs: Sequence[Any]
    ) -> list[Any]:
        return await self._wait(
            handles,
            method,
            [self._answer(h, method, r) for h, r in zip(handles, refs, strict=True)],
        )

    async def _wait(
        self, handles: Sequence[Handle], method: str, calls: Sequence[Awaitable[Any]]
    ) -> list[Any]:
        role, indices = handles[0].role, [handle.index for handle in handles]

        try:
            return await self.waits.gather(role, method, indices, calls, self.death)
        except WaitTimeout:
            # the stacks of those that hang go into their logs
            for handle in handles:
                handle.of.dump.remote()
            await asyncio.sleep(1)
            raise

    async def _answer(self, handle: Handle, method: str, ref: Any) -> Any:
        try:
            answer = await ref
        except ray.exceptions.RayError as error:
            raise self._lost(handle, method, error) from None
        if isinstance(answer, Failure):
            raise self._failed(handle, method, answer)
        return answer

    def _failed(self, handle: Handle, method: str, failure: Failure) -> CouplerError:
        log = self._log(handle.role, handle.index)
        return failure.error(self._who(handle), method, log, _tail(log))

    def _lost(self, handle: Handle, method: str, error: ray.exceptions.RayError) -> CouplerError:
        if isinstance(error, ray.exceptions.RayActorError):
            return self._died(handle, method, error)
        return WorkerFailed(f"{self._who(handle)} cannot be asked for {method}: {error}")

    async def _watch(self, handle: Handle) -> None:
        """Make every wait of the run end when this actor dies or is stopped.

        Without a replica the run goes on.
        """
        try:
            await self._until_stopped(handle)
            stopped = f"{self._who(handle)} is stopped, by SIGSTOP or SIGTSTP"
            if handle.role in ROLLOUTS:
                log.warning(f"{stopped}; it is killed, and starts again")
            elif not self.death.done():
                at = self._log(handle.role, handle.index)
                self.death.set_exception(WorkerDied(f"{stopped}, and is killed.\n  log:  {at}"))

            await self._look(handle, Process.kill)
            while True:
                await handle.of.alive.remote(self.watch_s)
        except ray.exceptions.RayActorError as error:
            died = self._died(handle, "", error)
            if handle.role not in ROLLOUTS and not self.death.done():
                self.death.set_exception(died)

    async def _until_stopped(self, handle: Handle) -> None:
        """Return once an actor is silent, and its process is stopped at two looks.

        Raises:
            RayActorError: it died.
        """
        while True:
            asked = asyncio.ensure_future(cluster.answer_of(handle.of.alive.remote(self.watch_s)))
            looks = 0
            while not (await asyncio.wait({asked}, timeout=2 * self.watch_s))[0]:
                looks = looks + 1 if await self._look(handle, Process.is_stopped) else 0
                if looks == 2:
                    asked.cancel()
                    return

            await asked

    async def _look(self, handle: Handle, look: Callable[[Process], Any]) -> Any:
        slot = self.slots[handle.role][handle.index]
        return await cluster.on_node(slot, look, self.places[handle].process)

    def _died(
        self, handle: Handle, method: str, error: ray.exceptions.RayActorError
    ) -> WorkerDied | ReplicaDied:
        how = str(error).split("Worker exit detail: ")[-1].split(" Some common causes")[0].strip()
        log = self._log(handle.role, handle.index)

        during = [wait for wait in self.waits.current.values() if wait.role == handle.role]
        names = sorted({wait.method for wait in during}) or ([method] if method else [])
        lines = [
            f"{self._who(handle)} died{' in ' + ' and '.join(names) if names else ''}: {how}",
            f"  log:  {log}",
        ]
        text = "\n".join([*lines, *_tail(log)])

        if handle.role not in ROLLOUTS:
            return WorkerDied(text)
        self.lost.add(handle)
        return ReplicaDied(text)

    def _who(self, handle: Handle) -> str:
        place = self.places.get(handle)
        kind = "replica" if handle.role in ROLLOUTS else "rank"
        where = f" (pid {place.process.pid}, node {place.node})" if place else ""
        return f"{handle.role} {kind} {handle.index}{where}"

    def _log(self, role: str, index: int) -> Path:
        return self.logs / f"{role}-{index}.log"

    def close(self) -> None:
        """End every actor, and give the resources back."""
        self.waits.close()
        for task in (*self.watches, *self.streams):
            task.cancel()

        closing = [handle.of.close.remote() for handle in self.handles]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        if self.own:
            self.own.stop()
            return

        for handle in self.handles:
            ray.kill(handle.of)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)


def _tail(log: Path) -> list[str]:
    """Return the last lines of a log, indented.

    There are none where the log is on the disk of another machine.
    """
    if not log.is_file():
        return []
    return [f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-TAIL:]]
