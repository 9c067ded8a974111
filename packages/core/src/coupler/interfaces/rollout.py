"""Define one replica of an inference backend, its requests and its completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Self

from coupler.errors import CouplerError
from coupler.interfaces.model import Model, Rank
from coupler.interfaces.options import no_effect
from coupler.interfaces.weights import SyncReceipt, WeightUpdate
from coupler.system.process_memory import resident_bytes


@dataclass
class RolloutConfig:
    """The options of every rollout. The config class of a rollout extends it and gives
    ``name`` its default.
    """

    name: str = ""
    """Name of the backend, chosen by rollout=NAME."""
    replicas: int = no_effect(1)
    """Independent copies that share the requests. Above 1 needs executor=ray."""
    python: str = no_effect("")
    """Interpreter of the replicas under executor=ray. Empty takes the job's own."""

    @property
    def devices_per_replica(self) -> int:
        """Return how many devices, all of one node, share one copy of the model."""
        return 1

    @property
    def sequence_limit(self) -> tuple[str, int]:
        """Return name and value of the option that bounds the tokens of a prompt with
        its completion. The value 0 means that no option does.
        """
        return "", 0

    def for_run(self, longest: int) -> Self:
        """Return this configuration for a run whose sequences have at most ``longest``
        tokens, prompts included.
        """
        return self

    @property
    def adapter_limit(self) -> tuple[str, int]:
        """Return name and value of the option that bounds the rank of adapters. The
        value 0 means that the rollout runs no adapter.
        """
        return "", 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to sample. It holds token ids, since a rollout never sees text.

    Attributes:
        temperature: 0 samples greedily.
        stop: token ids that end the completion. The stop token is part of it.
        session: requests of one session go to one replica, whose prefix cache is warm,
            while that replica is not overloaded.
        routed_experts: whether to return the experts of every token, by capability
            ``output:routed_experts``.
        top_p: sample among the fewest tokens whose probabilities add up to this, by
            capability ``sampling:top_p``.
        top_k: with a temperature above 0, sample among so many most likely tokens, or
            among what ``top_p`` leaves of their probability, and return the ids, by
            capability ``output:sampling_mask``. 0 stands for all tokens.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    stop: tuple[int, ...] = ()
    seed: int = 0
    session: str = ""
    routed_experts: bool = False
    top_p: float = 1.0
    top_k: int = 0

    def room(self, max_positions: int, vocabulary: int) -> int:
        """Check the request against a model, and return how many tokens may be sampled.

        Raises:
            CouplerError: the model takes no such prompt, number of tokens or
                temperature.
        """
        length = len(self.prompt)

        if self.max_tokens < 1:
            raise CouplerError(
                f"a request wants {self.max_tokens} tokens.\n"
                "  set:  sampling.max_tokens to at least 1"
            )
        if not 0 < length < max_positions:
            raise CouplerError(
                f"a prompt has {length} tokens; this rollout takes 1 to {max_positions - 1} "
                "and a completion.\n"
                "  set:  data.max_prompt_tokens"
            )
        if min(self.prompt) < 0 or max(self.prompt) >= vocabulary:
            raise CouplerError(
                f"a prompt holds token ids from {min(self.prompt)} to {max(self.prompt)}; the "
                f"model knows 0 to {vocabulary - 1}.\n"
                "  the tokenizer is not this model's: see model.path"
            )
        if not self.temperature >= 0:
            raise CouplerError(
                f"sampling.temperature must be at least 0, it is {self.temperature}."
            )

        return min(self.max_tokens, max_positions - length)


# how a completion ended: after an abort core asks for the rest
Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled answer to one request.

    Attributes:
        tokens: sampled token ids.
        logprobs: one per token, the natural log under the sampling distribution, after
            temperature, ``top_k`` and ``top_p``.
        versions: one per token, the version of the weights that sampled it.
        routed_experts: if asked for, integers [prompt + tokens, layers, topk] as in
            :class:`Output`, with rows of -1 for tokens that were never fed.
        sampling_mask: with ``top_k``, integers [tokens, kept], the ids that each token
            was sampled among. They are more than ``top_k`` where several are equally
            likely. A row with fewer of them ends in -1.
        replica: number of the replica that sampled it, or its last part. Core fills it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    routed_experts: Any = None
    sampling_mask: Any = None
    replica: int = field(default=0, compare=False)


class InFlight(StrEnum):
    """The treatment of requests that are being sampled when a pause begins."""

    # wait until they are done, which every rollout can do
    DRAIN = "drain"
    # they end with the tokens that they have
    ABORT = "abort"
    # they go on after the update, with a cache that the new weights compute
    RECOMPUTE = "recompute"
    # they go on with their cache, which no request that starts after the update reads
    STALE_KV = "stale_kv"


class Memory(StrEnum):
    """A kind of device memory that a rollout can free."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Rollout(ABC):
    """One replica of an inference backend.

    It starts with dummy weights, and only :meth:`update` brings real ones, unless
    :attr:`Model.own_weights` asks for those of the folder.
    """

    def __init__(self, config: Any, model: Model) -> None:
        self.config, self.model = config, model

    async def prepare(self, rank: Rank) -> None:
        """Start processes and what they import, without memory of a device.

        Core calls it before engines load. It returns soon, and :meth:`setup` or
        :meth:`close` follows. The default does nothing.
        """

    @abstractmethod
    async def setup(self, rank: Rank) -> int:
        """Start serving, and return how many model workers this replica has.

        Core calls it again after a method raised :class:`~coupler.errors.ReplicaDied`.
        The replica then starts anew, with dummy weights.
        """

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Many calls run at once, for the rollout to batch."""

    @abstractmethod
    async def update(self, update: WeightUpdate) -> SyncReceipt:
        """Load ``update.receive(worker)`` inside every model worker, drop stale caches,
        and adopt its version.

        With capability ``weights:lora``, an update brings either an adapter or the
        weights beneath it, which then serve alone until an adapter comes.
        """

    @abstractmethod
    async def pause(self, in_flight: InFlight) -> None:
        """Stop admitting requests, and return when no token is sampled any more.

        Later calls of :meth:`generate` wait.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Undo :meth:`pause`."""

    async def sleep(self, what: frozenset[Memory]) -> None:
        """Free this device memory. Until it is back, :meth:`generate` raises.

        This belongs to capability ``memory:sleep``.
        """

    async def wake(self, what: frozenset[Memory]) -> None:
        """Undo :meth:`sleep`.

        Weights come back with undefined contents, and an update follows.
        """

    async def holds_base(self) -> bool:
        """Return whether this replica still holds the weights beneath an adapter.

        It does not after a start, nor once they have slept. They then come again before
        the next adapter. This belongs to capability ``weights:lora``.
        """
        return False

    async def device_bytes(self) -> int:
        """Return the device memory of the worker that holds most, 0 on the CPU."""
        return 0

    async def host_bytes(self) -> int:
        """Return the host memory of this process and of those that it started."""
        return resident_bytes()

    def close(self) -> None:
        """End processes that this replica started. :meth:`setup` may follow."""
