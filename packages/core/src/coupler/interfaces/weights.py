"""Transport: named tensors on their way from engine ranks to rollout workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from coupler.interfaces.model import Rank
from coupler.system.imports import resolve

LORA = "lora"  # the weight format in which an adapter travels apart from the weights beneath it
Named = tuple[str, Any]  # (name in the checkpoint's safetensors index, whole tensor)
Shapes = Mapping[str, tuple[int, ...]]  # of a model's tensors, by such names


@dataclass(frozen=True, slots=True)
class SyncReceipt:
    """What one replica did with a weight update. Tied, fused and declared-absent names are already resolved."""

    version: int
    num_received: int  # tensors that came in
    num_loaded: int  # of those, tensors that changed a parameter
    num_bytes: int
    missing: tuple[str, ...] = ()  # parameters of the rollout that no received tensor reached
    unexpected: tuple[str, ...] = ()  # received names that no parameter takes
    seconds: Mapping[str, float] = field(default_factory=dict)  # per phase


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one engine rank can be reached by receivers; empty for a rank that sends nothing."""

    address: str = ""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What both sides of one weight sync are given. Small and plain; never holds a tensor."""

    version: int
    format: str  # what both sides declared as the capability "weights:<format>"
    transport: str  # "package.module:Class"
    endpoints: tuple[Endpoint, ...]  # one per engine rank, from Transport.bind
    num_receivers: int  # model workers over all replicas
    deadline_s: float
    permuted: bool = False  # start-up test: elements travel in reverse order; an adapter's are random
    attempt: int = 0  # the same version once more, after a replica died while it got it
    adapter: bool = False  # of format lora: A and B of every adapted weight travel, else the weights beneath them

    @property
    def key(self) -> tuple[int, int, bool, bool]:
        """What tells one transfer from every other one of the edge."""
        return self.version, self.attempt, self.permuted, self.adapter

    def open(self) -> Transport:
        return open_transport(self.transport)

    def receive(self, worker: Rank, shapes: Shapes | None = None) -> Iterator[Named]:
        """What :meth:`Transport.receive` yields."""
        return self.open().receive(self, worker, shapes or {})


@dataclass(frozen=True, slots=True)
class SendReceipt:
    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    dtype: str = ""  # filled by core: the least precise dtype that travelled


class Transport(ABC):
    """Carries named tensors from engine ranks to rollout workers. Knows neither backend.

    One instance per process and class, from :func:`open_transport`.
    """

    @abstractmethod
    def bind(self, rank: Rank) -> Endpoint:
        """Called once, on every engine rank."""

    @abstractmethod
    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        """Called on every engine rank; exhausts ``weights`` on each, since producing them is collective."""

    @abstractmethod
    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        """Called in every rollout worker. A tensor is valid until the next one is asked for.

        Args:
            shapes: of the worker's own model. What is announced is held against them before it is taken; a name that
                is not among them is taken as it comes.

        Raises:
            WaitTimeout: nothing arrived within ``update.deadline_s``.
            WeightSyncError: a tensor has another shape than the worker's.
        """

    def call_off(self, update: WeightUpdate, num_receivers: int) -> None:
        """Tell senders that wait for receivers that so many of this update died.

        Called on the controller. They give up once the other receivers came. A transport whose
        senders wait for nobody needs none.
        """


@cache
def open_transport(target: str) -> Transport:
    return resolve(target)()
