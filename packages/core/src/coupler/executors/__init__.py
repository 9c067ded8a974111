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

    # calls under way, and whatever is made from several of them
    waits: Waits

    async def place(self, roles: Sequence[Role]) -> None:
        """Take the devices and processors that these roles need.

        Raises:
            PlacementError: the cluster does not have them.
        """
        ...

    def spawn(self, role: str, index: int, build: str, spec: Any, python: str = "") -> Handle:
        """Start to create ``build(spec)``, and return a handle of it.

        ``build`` is ``"package.module:name"``.
        """
        ...

    async def locate(self, handles: Sequence[Handle], ranks: Sequence[Rank]) -> list[Rank]:
        """Wait until the objects exist, and return ``ranks`` with node and devices, and
        several of them with a rendezvous too.
        """
        ...

    async def revive(self, handle: Handle) -> Handle:
        """Make a worker anew if its process has ended, and return its handle now.

        It gets the same place and the same spec. A call of a replica that ends raises
        :class:`~coupler.errors.ReplicaDied`. The end of any other worker ends the run.
        """
        ...

    def put(self, value: Any) -> Any:
        """Return a reference to ``value`` for the arguments of several calls.

        The value travels once.
        """
        ...

    async def each(
        self,
        handles: Sequence[Handle],
        method: str,
        arguments: Iterable[tuple[Any, ...]],
        *,
        aside: bool = False,
    ) -> list[Any]:
        """Call a method of several workers of one role, each with its own arguments.

        Return one result per worker.

        Args:
            aside: the call waits for something that the caller's own thread goes on to
                do.
        """
        ...

    async def call(self, handle: Handle, method: str, *args: Any) -> Any:
        """Call a method of one worker.

        Calls that are made together start together, in that order.
        """
        ...

    async def reads(self) -> set[str]:
        """Return the full keys of options that workers in other processes have read."""
        ...

    def close(self) -> None: ...


def open_executor(config: RunConfig) -> Executor:
    """Make the executor that ``config.executor`` names.

    It takes no device and starts nothing yet.
    """
    waits = Waits(config.waits.deadline_s, config.waits.heartbeat_s)
    if config.executor is ExecutorName.RAY:
        from coupler.executors.ray.executor import OnRay

        # Ray reads the environment when it is imported
        with of_ray(starts=not config.ray.address):
            present("ray", "coupler-core[ray]")
        return OnRay(config.ray, waits, Path(config.run_dir).absolute() / "logs")
    if config.executor is ExecutorName.TORCHRUN:
        from coupler.executors.torchrun.executor import OnTorchrun

        return OnTorchrun(waits, Path(config.run_dir).absolute())
    return Local(inline=config.max_staleness == 0, waits=waits)
