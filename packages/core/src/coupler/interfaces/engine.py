"""Define one rank of a training backend, and the outputs that it computes."""

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

# Packed [T] tensors on the engine's device, with seq [T], cu_seqlens [B + 1] and
# num_seqs (an int on the host).
Columns = Mapping[str, Any]
# (model outputs, batch columns) -> (loss per token [T], metrics)
Loss = Callable[[Columns, Columns], tuple[Any, Metrics]]


@dataclass(frozen=True, slots=True)
class Layout:
    """The data shard that each rank of an engine reads, and the ranks that answer.

    Example:
        Two data shards, each over two tensor-parallel ranks: ``Layout((0, 0, 1, 1),
        (True, False, True, False))``.

    Attributes:
        shard_of: [world] the data shard that each rank reads.
        answers: [world] True on the one rank per shard that returns results.
    """

    shard_of: tuple[int, ...]
    answers: tuple[bool, ...]

    def __post_init__(self) -> None:
        answering = sorted(s for s, a in zip(self.shard_of, self.answers, strict=True) if a)
        if answering != list(range(self.num_shards)):
            raise ValueError(f"every data shard needs exactly one answering rank, got {self}")

    @property
    def num_shards(self) -> int:
        """Return the number of data shards."""
        return max(self.shard_of) + 1


@dataclass(frozen=True, slots=True)
class Output:
    """A quantity that a model computes per token.

    ``logprobs`` and ``entropy`` describe the sampling distribution in nats, from a
    model with ``Head.LM``. ``sum_pi_squared``, of capability
    ``output:sum_pi_squared``, is the sum of its squared probabilities. ``values`` come
    from a model with another head, by an engine of capability ``output:values``. Row t
    is the value of the state before token t, read from the hidden state of token t - 1.
    Temperature does not change it. ``base_logprobs`` are those of the model before
    training, by an engine of capability ``output:base_logprobs``, which trains an
    adapter. ``routed_experts``, of capability ``output:routed_experts``, is an integer
    column ``[T, layers, topk]``. Row t holds the experts that token t itself went to in
    each layer that has a router, from the first such layer on.

    ``top_ids`` and ``top_logprobs`` are of capability ``output:topk``. ``top_ids`` are
    integers ``[T, k]``, the ids of most probability, which falls along a row. A row
    ends in -1 where the vocabulary has fewer. ``top_logprobs`` are the log-probs
    ``[T, k]`` of these or, where ``top_ids`` is not wanted, of the ids in the batch's
    column ``top_ids``. That of -1 is so low that its probability is 0.

    Attributes:
        k: how many ids ``top_ids`` has. Other outputs have 0.
    """

    name: Literal[
        "logprobs",
        "entropy",
        "sum_pi_squared",
        "values",
        "base_logprobs",
        "routed_experts",
        "top_ids",
        "top_logprobs",
    ]
    k: int = 0

    def __post_init__(self) -> None:
        if (self.name == "top_ids") != (self.k > 0):
            raise ValueError(f"top_ids alone has a k, which is above 0; got {self}")


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The global facts of one optimizer step, equal on every rank.

    Engines weigh losses of their own with them.

    Attributes:
        total_tokens: tokens of all sequences of the mini-batch, over all ranks.
        index: optimizer steps done before this one.
    """

    total_tokens: int
    index: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of :meth:`Engine.step`, equal on all ranks.

    Attributes:
        applied: False if the gradient was not finite, which is never applied.
        grad_norm: norm of the whole gradient before clipping.
        lr: learning rate of the step.
    """

    applied: bool
    grad_norm: float
    lr: float


class Part(StrEnum):
    """A part of an engine's state."""

    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER = "optimizer"


Parts = frozenset[Part]
EVERYTHING: Parts = frozenset(Part)
# hashes of the chunks of each file in a folder, by its name: see coupler.system.hashing
FileHashes = Mapping[str, Sequence[str]]


class Pending(Protocol):
    """A save under way."""

    def wait(self, seconds: float) -> FileHashes | None:
        """Wait until the save is done.

        Returns:
            Hashes of the files that were hashed as they were written, if any were.
            Core reads the others to hash them.

        Raises:
            WaitTimeout: the save was not done in time.
            Exception: the error that made the save fail.
        """
        ...


@dataclass
class EngineConfig:
    """The options of every engine. The config class of an engine extends it and gives
    ``name`` its default.

    ``one_rank`` maps each option that spreads the work over ranks to the value that
    leaves it to one rank. Commands that only read a checkpoint start with these values.
    An engine that can split the model adds its own options.
    """

    one_rank: ClassVar[Mapping[str, Any]] = {"ranks": 1}
    name: str = ""
    """Name of the backend, chosen by engine=NAME."""
    ranks: int = no_effect(1)
    """Processes that share one or more copies of the model. More need executor=ray."""
    python: str = no_effect("")
    """Interpreter of the ranks under executor=ray. Empty takes the job's own."""

    @property
    def ranks_per_shard(self) -> int:
        """Return how many ranks read the same data shard.

        It is above 1 where ranks split the model or each sequence.
        """
        return 1

    @property
    def ranks_per_group(self) -> int:
        """Return the number that ``ranks`` has to be a multiple of.

        It is above ``ranks_per_shard`` where shards of data share one of the model.
        """
        return self.ranks_per_shard

    @property
    def ranks_per_sequence(self) -> int:
        """Return how many ranks hold a part of each sequence.

        :attr:`micro_batch_limit` applies to each of them.
        """
        return 1

    @property
    def micro_batch_limit(self) -> tuple[str, int]:
        """Return name and value of the option that bounds the tokens of a rank's
        micro-batch. The value 0 means that no option does.
        """
        return "", 0

    @property
    def split(self) -> str:
        """Describe how ranks share the work, as in "tensor 2 x pipeline 2".

        It is empty where each rank has data of its own.
        """
        return ""

    @property
    def rate(self) -> str:
        """Describe the learning rate, as in "cosine over 200 optimizer steps".

        It is empty where the engine does not tell.
        """
        return ""

    @property
    def rounds_to(self) -> str:
        """Return the dtype that products round their operands to, as in
        "float8_e4m3fn". Log-probs of a rollout may then differ by more.

        It is empty where operands are as the weights that a rollout gets.
        """
        return ""

    def for_run(self, num_steps: int) -> Self:
        """Return this configuration for a run of ``num_steps`` optimizer steps.

        Raises:
            ValueError: it does not fit into such a run. The message names the key.
        """
        return self

    @property
    def adapter_rank(self) -> tuple[str, int]:
        """Return name and value of the option that sets the rank of the trained
        adapter. The value 0 means that no adapter is trained.
        """
        return "", 0


class Engine(ABC):
    """One rank of a training backend, as a plain class that cannot tell Ray from a
    thread.

    Core calls every method on every rank, in the same order. Construction is cheap and
    touches no device. An engine only reads a batch, whose memory is the controller's.
    """

    def __init__(self, config: Any, model: Model) -> None:
        self.config, self.model = config, model

    @abstractmethod
    def setup(self, rank: Rank) -> Layout:
        """Join the process group, load the model, and return how ranks consume data."""

    @abstractmethod
    def forward(self, batch: Batch, want: tuple[Output, ...]) -> Batch:
        """Return ``batch`` with a float32 token column per wanted output. No gradient.

        Reads the columns ``tokens``, ``loss_mask`` and ``temperature`` (1 where
        absent). Outputs are computed where ``loss_mask`` is true and are 0 elsewhere.
        Only ``routed_experts`` has a row for every token. It and ``top_ids`` are
        columns of integers. A rank's batch may be empty.

        With capability ``output:routed_experts`` the column ``routed_experts``, where
        the batch has it, decides which experts each token goes to, here and in
        :meth:`forward_backward`. A row of -1 leaves the choice to the router. Experts
        are weighted by the current scores, so that the router keeps its gradient.

        With capability ``input:sampling_mask`` all that describes a distribution, here
        and in :meth:`forward_backward`, is of the one over the ids in the token's row
        of the column ``sampling_mask``, integers ``[T, kept]``, where the batch has it.
        The probabilities of these ids add up to 1. A row ends in -1 where there are
        fewer, and a row of -1 alone stands for every id.
        """

    @abstractmethod
    def forward_backward(
        self, batch: Batch, want: tuple[Output, ...], loss: Loss, step: StepInfo
    ) -> Metrics:
        """Compute the gradient of ``sum(token_loss * loss_weight)`` over all ranks.

        Core calls it once per :meth:`step`. Micro-batches are the engine's affair, and
        its ranks agree on their number. The engine calls ``loss`` once per micro-batch
        with the wanted outputs and every column of it as tensors, and gets losses per
        token ``[T]``.
        """

    @abstractmethod
    def step(self) -> StepResult:
        """Clip, apply and clear the gradient, and advance the learning rate."""

    @abstractmethod
    def weights(self) -> Iterator[Named]:
        """Yield every tensor of the checkpoint index that training may change.

        Tensors are whole and come one at a time, in the same order on every rank. Every
        rank takes part in each of them. A tensor is valid until the next one is asked
        for. An adapter's updates are added.
        """

    def base_weights(self) -> Iterator[Named]:
        """Yield the tensors of :meth:`weights` without the adapter's updates.

        This belongs to capability ``weights:lora``.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no adapter apart.")

    def adapter_weights(self) -> Iterator[Named]:
        """Yield A and B of every adapted weight, like :meth:`weights`.

        Their names, shapes and scale are those of :mod:`coupler.engine_kit.lora_names`.
        This belongs to capability ``weights:lora``.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no adapter apart.")

    @abstractmethod
    def gradients(self) -> Iterator[Named]:
        """Yield the whole gradient between :meth:`forward_backward` and :meth:`step`.

        It comes like :meth:`weights`, with zeros for a parameter without a gradient.
        The conformance kit and diagnostics read it.
        """

    @abstractmethod
    def save(self, path: Path, what: Parts) -> Pending:
        """Start to write ``what`` into the existing folder ``path``.

        Core writes the manifest when all ranks are done.
        """

    @abstractmethod
    def load(self, path: Path, what: Parts) -> None:
        """Read ``what`` from a folder of :meth:`save`."""

    def offload(self, what: Parts) -> None:
        """Move ``what`` from the device to the host.

        This belongs to capability ``memory:offload``.
        """

    def onload(self, what: Parts) -> None:
        """Undo :meth:`offload`."""

    def device_bytes(self) -> int:
        """Return the device memory that this process holds now, 0 on the CPU."""
        return 0

    def close(self) -> None:
        """Release resources that would outlive the engine, such as its process group.

        Core calls it once at the end of a worker, on every rank, also after a call has
        failed, and does not wait for long. No other method is called after it.
        """
