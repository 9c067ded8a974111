"""Carry named tensors from engine ranks to rollout workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from coupler.interfaces.model import Rank
from coupler.system.imports import load_subclass

# the weight format in which an adapter travels apart from the weights beneath it
LORA = "lora"
# (name in the checkpoint's safetensors index, whole tensor)
Named = tuple[str, Any]
# shapes of a model's tensors, by such names
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SyncReceipt:
    """One replica's account of a weight update.

    Tied, fused and declared-absent names are already resolved.

    Attributes:
        num_received: tensors that came in.
        num_loaded: received tensors that changed a parameter.
        missing: parameters of the rollout that no received tensor reached.
        unexpected: received names that no parameter takes.
        seconds: duration of each phase.
        dtype: the least precise dtype of the replica's parameters, if it says so.
    """

    version: int
    num_received: int
    num_loaded: int
    num_bytes: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of one engine rank, empty for a rank that sends nothing."""

    address: str = ""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The description of one transfer, which both sides get. It never holds a tensor.

    Attributes:
        format: the capability ``weights:<format>`` that both sides declared.
        transport: ``"package.module:Class"``.
        endpoints: one per engine rank, from :meth:`Transport.bind`.
        num_receivers: model workers over all replicas.
        permuted: whether this is the start-up proof, in which elements travel in
            reverse order and those of an adapter are random.
        attempt: counts transfers of one version. It rises when a replica died.
        adapter: in format ``lora``, whether A and B of every adapted weight travel
            instead of the weights beneath them.
    """

    version: int
    format: str
    transport: str
    endpoints: tuple[Endpoint, ...]
    num_receivers: int
    deadline_s: float
    permuted: bool = False
    attempt: int = 0
    adapter: bool = False

    @property
    def key(self) -> tuple[int, int, bool, bool]:
        """Return the key that tells this transfer from every other one of the edge."""
        return self.version, self.attempt, self.permuted, self.adapter

    def open(self) -> Transport:
        """Return this process's instance of the transport."""
        return open_transport(self.transport)

    def receive(self, worker: Rank, shapes: Shapes | None = None) -> Iterator[Named]:
        """Yield the tensors of :meth:`Transport.receive`."""
        return self.open().receive(self, worker, shapes or {})


@dataclass(frozen=True, slots=True)
class SendReceipt:
    """One engine rank's account of a transfer.

    Attributes:
        dtype: the least precise dtype that travelled, or that the engine's products
            round to. Core fills it.
    """

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    dtype: str = ""


class Transport(ABC):
    """Carries named tensors from engine ranks to rollout workers, and knows neither
    backend.

    :func:`open_transport` makes one instance per process and class.
    """

    @abstractmethod
    def bind(self, rank: Rank) -> Endpoint:
        """Return the address of an engine rank. Core calls it once for every edge."""

    @abstractmethod
    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        """Send ``weights`` from an engine rank.

        Core calls it on every rank. Each one exhausts ``weights``, since producing them
        is collective.
        """

    @abstractmethod
    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        """Yield the tensors in a rollout worker.

        A tensor is valid until the next one is asked for.

        Args:
            shapes: those of the worker's own model. An announced shape is compared with
                them before the tensor is taken. A name that is not among them is not
                checked.

        Raises:
            WaitTimeout: nothing arrived within ``update.deadline_s``.
            WeightSyncError: a tensor has another shape than the worker's.
        """

    def call_off(self, update: WeightUpdate, num_receivers: int) -> None:
        """Tell waiting senders that ``num_receivers`` receivers of this update died.

        Core calls it on the controller. Senders give up once the other receivers came.
        A transport whose senders never wait for receivers needs no override.
        """


@cache
def open_transport(target: str) -> Transport:
    """Return this process's instance of ``"package.module:Class"``."""
    return load_subclass(target, Transport)()
