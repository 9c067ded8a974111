"""Define the weight sync between an engine and its rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np

from coupler.batch import Batch
from coupler.interfaces.engine import Output
from coupler.interfaces.rollout import Completion, InFlight, Request
from coupler.interfaces.weights import Endpoint, SendReceipt, SyncReceipt, WeightUpdate
from coupler.metrics import Metrics


class EngineSide(Protocol):
    """The ranks of the engine whose weights are sent."""

    async def bind(self, transport: str) -> list[Endpoint]:
        """Call :meth:`Transport.bind` on every rank, and return one endpoint a rank."""
        ...

    async def push(self, update: WeightUpdate) -> list[SendReceipt]:
        """Send the weights from every rank, and return one receipt a rank.

        The rollouts take them at the same time.
        """
        ...

    async def forward(self, batch: Batch, want: tuple[Output, ...]) -> Mapping[str, np.ndarray]:
        """Return a column ``[T]`` per wanted output, in the order of ``batch``."""
        ...


class RolloutSide(Protocol):
    """The replicas that get the weights.

    Attributes:
        replicas: every replica, dead ones included.
        dead: numbers of the replicas that died and were not started again.
        paused: from :meth:`pause` to :meth:`resume`.
    """

    replicas: Sequence[Any]
    dead: Collection[int]
    paused: bool

    @property
    def num_receivers(self) -> int:
        """Model workers over all living replicas."""
        ...

    async def prepare(self) -> None:
        """Start the processes of every replica, without memory of a device."""
        ...

    async def setup(self) -> None:
        """Start every replica, with dummy weights."""
        ...

    async def pause(self, in_flight: InFlight) -> None:
        """Return when no living replica samples any more. Later requests wait."""
        ...

    async def revive(self, in_flight: InFlight) -> None:
        """Start the dead replicas again, paused and with dummy weights.

        Raises:
            ReplicaDied: one was started too often.
        """
        ...

    async def update(self, update: WeightUpdate) -> list[SyncReceipt]:
        """Bring the weights to every living replica, and return one receipt each.

        Raises:
            ReplicaDied: a replica died. Call :meth:`revive`, and push again with
                another ``attempt``.
        """
        ...

    async def holds_base(self) -> bool:
        """Return whether every living replica holds the weights beneath an adapter."""
        ...

    async def sample_on_each(self, request: Request) -> list[Completion]:
        """Sample one completion on every living replica."""
        ...

    async def resume(self) -> None:
        """Undo :meth:`pause` on every living replica."""
        ...


class DeviceTurns(Protocol):
    """The turns that roles take on shared devices. Without sharing they do nothing."""

    def syncing(self, phase: str) -> AbstractAsyncContextManager[None]:
        """Hold the engine's parameters and the rollouts' weights on the device."""
        ...

    def generating(self, phase: str) -> AbstractAsyncContextManager[None]:
        """Hold the rollouts' weights and cache on the device, without the engine."""
        ...


class ShardingManager(ABC):
    """Moves the weights of one edge (an engine, its rollouts) from the training to the
    inference layout.

    The trainer calls :meth:`setup` once and :meth:`prove` before the first step. After
    every step it calls :meth:`check` and :meth:`sync`, and also :meth:`probe` if the
    check could not judge. Only :meth:`sync` has no default.

    Attributes:
        version: the last version that every rollout holds, -1 before the first sync.
        endpoints: one per engine rank, from :meth:`setup` on.
    """

    version: int = -1
    endpoints: tuple[Endpoint, ...] = ()

    def __init__(
        self,
        config: Any,
        *,
        engine: EngineSide,
        rollouts: RolloutSide,
        weight_format: str,
        transport: str,
        probe_prompt: tuple[int, ...],
        temperature: float,
        residency: DeviceTurns,
        in_flight: InFlight,
    ) -> None:
        """Keep the arguments, and start nothing.

        Args:
            config: the options ``sync.*`` of the run.
            weight_format: the format that engine, rollout and transport share, such as
                ``full`` or ``lora``.
            transport: ``"package.module:Class"`` of the transport.
            probe_prompt: token ids of the prompt for comparing log-probs.
            temperature: sampling temperature of the run.
            in_flight: the treatment of running requests in a pause.
        """
        self.config, self.engine, self.rollouts = config, engine, rollouts
        self.weight_format, self.transport = weight_format, transport
        self.probe_prompt, self.temperature = probe_prompt, temperature
        self.residency, self.in_flight = residency, in_flight

    async def setup(self) -> None:
        """Start the rollouts and bind the transport on every engine rank."""
        await self.rollouts.setup()
        self.endpoints = tuple(await self.engine.bind(self.transport))

    async def prove(self, version: int = 0) -> Metrics:
        """Bring the first weights, as ``version``, and prove that they arrived.

        The default only brings them.

        Raises:
            WeightSyncError: the rollouts do not run the weights they were sent.
        """
        return await self.sync(version)

    @abstractmethod
    async def sync(self, version: int) -> Metrics:
        """Bring every rollout to ``version``, and set :attr:`version`.

        Raises:
            WeightSyncError: a replica did not load everything that was sent.
        """

    def check(self, metrics: Metrics) -> bool:
        """Judge the last sync by the metrics of a step (``train_infer/*``).

        Returns:
            True if the sync was judged. If not, :meth:`probe` judges the next sync. The
            default returns True.

        Raises:
            WeightSyncError: the rollouts sampled with other weights than the engine's.
        """
        return True

    async def probe(self) -> Metrics:
        """Judge the last sync by tokens sampled for that alone.

        The default does nothing.

        Raises:
            WeightSyncError: the rollouts sample with other weights than the engine's.
        """
        return {}

    def weight_update(
        self, version: int, *, permuted: bool = False, attempt: int = 0, adapter: bool = False
    ) -> WeightUpdate:
        """Describe one transfer to both sides. See :class:`WeightUpdate`."""
        return WeightUpdate(
            version=version,
            format=self.weight_format,
            transport=self.transport,
            endpoints=self.endpoints,
            num_receivers=self.rollouts.num_receivers,
            deadline_s=self.config.deadline_s,
            permuted=permuted,
            attempt=attempt,
            adapter=adapter,
        )
