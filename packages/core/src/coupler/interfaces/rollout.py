"""Rollout: one replica of an inference backend, and what it samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from coupler.errors import CouplerError
from coupler.interfaces.model import Model, Rank
from coupler.interfaces.options import no_effect
from coupler.interfaces.weights import SyncReceipt, WeightUpdate
from coupler.system.process_memory import resident_bytes


@dataclass
class RolloutConfig:
    """What every rollout can be told; the config class of a rollout extends it and gives ``name`` its default."""

    name: str = ""  # of the backend; chosen by rollout=NAME
    replicas: int = no_effect(1)  # independent copies that share the requests; above 1 under executor=ray
    python: str = no_effect("")  # interpreter of these replicas, under executor=ray; empty: the one that runs the job

    @property
    def devices_per_replica(self) -> int:
        """Devices, all of one node, that one copy of the model is split over."""
        return 1

    @property
    def sequence_limit(self) -> tuple[str, int]:
        """Name and value of the option that bounds the tokens of a prompt with its completion; 0: none does."""
        return "", 0

    @property
    def adapter_limit(self) -> tuple[str, int]:
        """Name and value of the option that bounds the rank of an adapter that it runs itself; 0: it runs none."""
        return "", 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to sample. Token ids in: a rollout never sees text."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    stop: tuple[int, ...] = ()  # token ids that end the completion; the stop token is part of it
    seed: int = 0
    session: str = ""  # same session, same replica: its prefix cache is warm
    routed_experts: bool = False  # say which experts every token went to; capability ``output:routed_experts``
    top_p: float = 1.0  # sample among the fewest tokens that together have so much; capability ``sampling:top_p``

    def room(self, max_positions: int, vocabulary: int) -> int:
        """Check the request against a model; return how many tokens may be sampled, ``max_tokens`` at most.

        Raises:
            CouplerError: the model takes no such prompt, number of tokens or temperature.
        """
        length = len(self.prompt)
        if self.max_tokens < 1:
            raise CouplerError(f"a request wants {self.max_tokens} tokens.\n  set:  sampling.max_tokens to at least 1")
        if not 0 < length < max_positions:
            raise CouplerError(
                f"a prompt has {length} tokens; this rollout takes 1 to {max_positions - 1} and a completion.\n"
                "  set:  data.max_prompt_tokens"
            )
        if min(self.prompt) < 0 or max(self.prompt) >= vocabulary:
            raise CouplerError(
                f"a prompt holds token ids from {min(self.prompt)} to {max(self.prompt)}; the model knows 0 to "
                f"{vocabulary - 1}.\n  the tokenizer is not this model's: see model.path"
            )
        if not self.temperature >= 0:
            raise CouplerError(f"sampling.temperature must be at least 0, it is {self.temperature}.")
        return min(self.max_tokens, max_positions - length)


Finish = Literal["stop", "length", "abort"]  # how a completion ended; after an abort core asks for the rest


@dataclass(frozen=True, slots=True)
class Completion:
    """What a rollout sampled for one request. The three tuples have the same length."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # natural log, of the sampling distribution: after temperature, and ``top_p`` if set
    versions: tuple[int, ...]  # weights version that sampled each token
    finish: Finish
    routed_experts: Any = None  # if asked for: integers [prompt + tokens, layers, topk] as in Output; -1: never fed
    replica: int = field(default=0, compare=False)  # filled by core: which one sampled it, or its last part


class InFlight(StrEnum):
    """What a pause does with requests that are being sampled."""

    DRAIN = "drain"  # wait until they are done: the only one that every rollout knows
    ABORT = "abort"
    RECOMPUTE = "recompute"
    STALE_KV = "stale_kv"


class Memory(StrEnum):
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Rollout(ABC):
    """One replica of an inference backend. It starts with dummy weights: only :meth:`update` brings real ones."""

    def __init__(self, config: Any, model: Model) -> None:
        self.config, self.model = config, model

    @abstractmethod
    async def setup(self, rank: Rank) -> int:
        """Start serving; return how many model workers this replica has.

        Called again after a method raised :class:`~coupler.errors.ReplicaDied`: it starts anew, with dummy weights.
        """

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Many calls run at once; the rollout batches them."""

    @abstractmethod
    async def update(self, update: WeightUpdate) -> SyncReceipt:
        """Load ``update.receive(worker)`` inside every model worker, drop stale caches, and adopt its version.

        With capability ``weights:lora``, an update says whether an adapter comes or the weights beneath it, which then
        stand alone until one does.
        """

    @abstractmethod
    async def pause(self, in_flight: InFlight) -> None:
        """Stop admitting requests; return when no token is sampled any more. Later calls of generate wait."""

    @abstractmethod
    async def resume(self) -> None:
        """Undo :meth:`pause`."""

    async def sleep(self, what: frozenset[Memory]) -> None:
        """Free this device memory; until it is back, :meth:`generate` raises. Capability ``memory:sleep``."""

    async def wake(self, what: frozenset[Memory]) -> None:
        """Undo :meth:`sleep`. Weights come back with undefined contents: an update follows."""

    async def holds_base(self) -> bool:
        """Whether the weights beneath an adapter are as the last update brought them. Capability ``weights:lora``.

        Not after a start, nor once they have slept: they come again, before the next adapter.
        """
        return False

    async def device_bytes(self) -> int:
        """Device memory that the model worker with most of it holds now; 0 on the CPU."""
        return 0

    async def host_bytes(self) -> int:
        """Memory on its host of this process and of those that the replica started."""
        return resident_bytes()

    def close(self) -> None:
        """End processes that this replica started. :meth:`setup` may follow."""
