"""Executors: where the workers of a run live, and how the controller calls them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from coupler.config.schema import ExecutorName, RunConfig
from coupler.executors.environment import of_ray
from coupler.executors.handle import Handle
from coupler.executors.local import Local
from coupler.executors.placement import Role
from coupler.executors.waits import Waits
from coupler.interfaces import Rank
from coupler.system.imports import present

__all__ = ["Executor", "Handle", "Local", "open_executor"]


class Executor(Protocol):
    """Places workers, and calls their methods, plain or async."""

    waits: Waits  # what is under way, of calls and of what is made from several

    async def place(self, roles: Sequence[Role]) -> None:
        """Take what these roles need.

        Raises:
            PlacementError: it is not there.
        """
        ...

    def spawn(self, role: str, index: int, build: str, spec: Any, python: str = "") -> Handle:
        """Start to create ``build(spec)``, where ``build`` is ``"package.module:name"``; return a handle of it."""
        ...

    async def locate(self, handles: Sequence[Handle], ranks: Sequence[Rank]) -> list[Rank]:
        """Wait until the objects exist; return ``ranks`` with node, devices and, for several, a rendezvous."""
        ...

    async def revive(self, handle: Handle) -> Handle:
        """Make a worker anew, in its place and from the same spec, if its process has ended; return its handle now.

        A replica that ends is answered for with :class:`~coupler.errors.ReplicaDied`; any other worker ends the run.
        """
        ...

    def put(self, value: Any) -> Any:
        """Return what stands for ``value`` as an argument of several calls: it travels once."""
        ...

    async def each(
        self, handles: Sequence[Handle], method: str, arguments: Iterable[tuple[Any, ...]], *, aside: bool = False
    ) -> list[Any]:
        """Call a method of several workers of one role, each with its own arguments; one result per worker.

        Args:
            aside: the call waits for something that the caller's own thread goes on to do.
        """
        ...

    async def call(self, handle: Handle, method: str, *args: Any) -> Any:
        """Call a method of one worker. Calls that are made together start together, in that order."""
        ...

    async def reads(self) -> set[str]:
        """Full keys of options that workers in other processes have read."""
        ...

    def close(self) -> None: ...


def open_executor(config: RunConfig) -> Executor:
    """The executor that ``config.executor`` names; takes no device and starts nothing yet."""
    waits = Waits(config.waits.deadline_s, config.waits.heartbeat_s)
    if config.executor is ExecutorName.RAY:
        from coupler.executors.ray.executor import OnRay

        with of_ray(starts=not config.ray.address):  # it is read when Ray is imported
            present("ray", "coupler-core[ray]")
        return OnRay(config.ray, waits, Path(config.run_dir).absolute() / "logs")
    return Local(inline=config.max_staleness == 0, waits=waits)
