"""Engine: one rank of a training backend, and what it computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from coupler.batch import Batch
from coupler.interfaces.model import Model, Rank
from coupler.interfaces.options import no_effect
from coupler.interfaces.weights import Named
from coupler.metrics import Metrics

Columns = Mapping[
    str, Any
]  # packed [T] tensors on the engine's device, plus seq [T], cu_seqlens [B + 1], num_seqs (host int)
Loss = Callable[
    [Columns, Columns], tuple[Any, Metrics]
]  # (model outputs, batch columns) -> (per-token loss [T], metrics)


@dataclass(frozen=True, slots=True)
class Layout:
    """How an engine's ranks consume data: which shard each rank reads, and which ranks answer.

    Example:
        Two data shards, each over two tensor-parallel ranks: ``Layout((0, 0, 1, 1), (True, False, True, False))``.
    """

    shard_of: tuple[int, ...]  # [world] data shard read by each rank
    answers: tuple[bool, ...]  # [world] True on the one rank per shard that returns results

    def __post_init__(self) -> None:
        answering = sorted(s for s, a in zip(self.shard_of, self.answers, strict=True) if a)
        if answering != list(range(self.num_shards)):
            raise ValueError(f"every data shard needs exactly one answering rank, got {self}")

    @property
    def num_shards(self) -> int:
        return max(self.shard_of) + 1


@dataclass(frozen=True, slots=True)
class Output:
    """One thing a model computes per token.

    ``logprobs`` and ``entropy`` are of the sampling distribution, in nats, from a model with ``Head.LM``; so is
    ``sum_pi_squared``, the sum of its squared probabilities, of capability ``output:sum_pi_squared``. ``values``
    are from one with ``Head.VALUE``, by an engine of capability ``output:values``: row t is the value of the state
    before token t, which is read from the hidden state of token t - 1. No temperature touches it. ``base_logprobs``
    are the model's before training, by an engine of capability ``output:base_logprobs``: one that trains an adapter.
    ``routed_experts``, of capability ``output:routed_experts``, is an integer column ``[T, layers, topk]``: row t holds
    the experts that token t itself went to in each layer that has a router, from the first such layer on.
    """

    name: Literal["logprobs", "entropy", "sum_pi_squared", "values", "base_logprobs", "routed_experts"]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Global facts of one optimizer step, equal on every rank; engines weigh losses of their own with them."""

    total_tokens: int  # tokens of all sequences of the mini-batch, over all ranks
    index: int  # optimizer steps done before this one


@dataclass(frozen=True, slots=True)
class StepResult:
    """What :meth:`Engine.step` did. A non-finite gradient is never applied, on all ranks alike."""

    applied: bool
    grad_norm: float  # before clipping, over the whole gradient
    lr: float  # that the step used


class Part(StrEnum):
    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER = "optimizer"


Parts = frozenset[Part]
EVERYTHING: Parts = frozenset(Part)
FileHashes = Mapping[str, Sequence[str]]  # of each chunk of the files in a folder, by name: see coupler.system.hashing


class Pending(Protocol):
    """A save under way."""

    def wait(self, seconds: float) -> FileHashes | None:
        """Return when it is done; raise what made it fail, or ``WaitTimeout``.

        Returns:
            Hashes of files that were hashed as they were written, if any were; core reads the others for theirs.
        """
        ...


@dataclass
class EngineConfig:
    """What every engine can be told; the config class of an engine extends it and gives ``name`` its default.

    ``one_rank`` has the options, by name, that say how ranks share the work, with the
    values that leave it to one. A checkpoint of any layout is looked into so. An
    engine that can split the model adds its own.
    """

    one_rank: ClassVar[Mapping[str, Any]] = {"ranks": 1}
    name: str = ""  # of the backend; chosen by engine=NAME
    ranks: int = no_effect(1)  # processes that share one copy of the model or more; above 1 under executor=ray
    python: str = no_effect("")  # interpreter of these ranks, under executor=ray; empty: the one that runs the job

    @property
    def ranks_per_shard(self) -> int:
        """Ranks that read the same data shard: above 1 where they split the model or each sequence."""
        return 1

    @property
    def ranks_per_group(self) -> int:
        """Ranks that are a multiple of this: above ``ranks_per_shard`` where shards of data share one of the model."""
        return self.ranks_per_shard

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that hold a part of each sequence. :attr:`micro_batch_limit` counts for each of them."""
        return 1

    @property
    def micro_batch_limit(self) -> tuple[str, int]:
        """Name and value of the option that bounds the tokens of a rank's micro-batch; 0: none does."""
        return "", 0

    @property
    def split(self) -> str:
        """How ranks share the work, for people: "tensor 2 x pipeline 2"; empty where each has data of its own."""
        return ""

    @property
    def rate(self) -> str:
        """How the learning rate goes, for people: "cosine over 200 optimizer steps"; empty where core is not told."""
        return ""

    def for_run(self, num_steps: int) -> Self:
        """This configuration in a run that takes so many optimizer steps, for an engine that has to know them.

        Raises:
            ValueError: it does not fit into such a run; names the key.
        """
        return self

    @property
    def adapter_rank(self) -> tuple[str, int]:
        """Name and value of the option that sets the rank of the adapter that is trained; 0: none is."""
        return "", 0


class Engine(ABC):
    """One rank of a training backend: a plain class that cannot tell Ray from a thread.

    Core calls every method on every rank, in the same order. Construction is cheap and touches no device. A batch is
    only read: its memory is the controller's.
    """

    def __init__(self, config: Any, model: Model) -> None:
        self.config, self.model = config, model

    @abstractmethod
    def setup(self, rank: Rank) -> Layout:
        """Join the process group, load the model, and say how ranks consume data."""

    @abstractmethod
    def forward(self, batch: Batch, want: tuple[Output, ...]) -> Batch:
        """Return ``batch`` with a float32 token column per wanted output. No gradient.

        Reads the columns ``tokens``, ``loss_mask`` and ``temperature`` (1 where absent). Outputs are computed where
        ``loss_mask`` is true and are 0 elsewhere; ``routed_experts``, which is of integers, is there for every token.
        A rank's batch may be empty.

        With capability ``output:routed_experts`` the column ``routed_experts``, where the batch has it, decides which
        experts each token goes to, here and in :meth:`forward_backward`; a row of -1 leaves that to the router. Their
        weights are those of the current scores, so that the router keeps its gradient.
        """

    @abstractmethod
    def forward_backward(self, batch: Batch, want: tuple[Output, ...], loss: Loss, step: StepInfo) -> Metrics:
        """Compute the gradient of ``sum(token_loss * loss_weight)`` over all ranks; called once per :meth:`step`.

        Micro-batches are inside; ranks agree on their number. ``loss`` is called once per micro-batch with the wanted
        outputs and every column of it as tensors, and returns losses per token ``[T]``.
        """

    @abstractmethod
    def step(self) -> StepResult:
        """Clip, apply and clear the gradient, and advance the learning-rate schedule."""

    @abstractmethod
    def weights(self) -> Iterator[Named]:
        """Yield every tensor of the checkpoint index that training may change, whole, one at a time.

        Collective and lazy, in the same order on every rank. A tensor is valid until the next one is asked for. An
        adapter's updates are added.
        """

    def base_weights(self) -> Iterator[Named]:
        """Yield the same tensors as :meth:`weights`, without the adapter's updates. Capability ``weights:lora``."""
        raise NotImplementedError(f"{type(self).__name__} sends no adapter apart.")

    def adapter_weights(self) -> Iterator[Named]:
        """Yield A and B of every adapted weight, like :meth:`weights`. Capability ``weights:lora``.

        Their names, shapes and scale are those of :mod:`coupler.engine_kit.lora_names`.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no adapter apart.")

    @abstractmethod
    def gradients(self) -> Iterator[Named]:
        """Yield the whole gradient between :meth:`forward_backward` and :meth:`step`, like :meth:`weights`.

        A parameter that received none yields zeros. The conformance kit and diagnostics read it.
        """

    @abstractmethod
    def save(self, path: Path, what: Parts) -> Pending:
        """Write ``what`` into the existing folder ``path``; core writes the manifest when all ranks are done."""

    @abstractmethod
    def load(self, path: Path, what: Parts) -> None:
        """Read what :meth:`save` wrote."""

    def offload(self, what: Parts) -> None:
        """Move ``what`` from the device to the host. Capability ``memory:offload``."""

    def onload(self, what: Parts) -> None:
        """Undo :meth:`offload`."""

    def device_bytes(self) -> int:
        """Device memory that this process holds now; 0 on the CPU."""
        return 0

    def close(self) -> None:
        """Let go of what would outlive the engine, such as its process group.

        Whoever ends a worker calls it once at its end, on every rank, also after a call has
        failed, and does not wait for long. No other method is called after it.
        """
