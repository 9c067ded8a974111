"""The things a plugin can be. No signature mentions another plugin, Ray, or torch.

Shapes: T packed tokens of B sequences; every tensor of a token column is ``[T]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.metrics import Metrics
from coupler.system.imports import resolve
from coupler.system.process_memory import resident_bytes

API = 1  # generation of these interfaces; core accepts plugins of this one and the one before

LORA = "lora"  # the weight format in which an adapter travels apart from the weights beneath it

Named = tuple[str, Any]  # (name in the checkpoint's safetensors index, whole tensor)
Shapes = Mapping[str, tuple[int, ...]]  # of a model's tensors, by such names
Columns = Mapping[
    str, Any
]  # packed [T] tensors on the engine's device, plus seq [T], cu_seqlens [B + 1], num_seqs (host int)
Loss = Callable[
    [Columns, Columns], tuple[Any, Metrics]
]  # (model outputs, batch columns) -> (per-token loss [T], metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Where one worker stands: ``index`` of ``world``, on ``node``, with these devices."""

    index: int = 0
    world: int = 1
    rendezvous: str = ""  # "host:port" chosen by core for this group; empty where world == 1
    node: str = ""
    devices: tuple[str, ...] = ()  # UUIDs; empty: the CPU, or whatever the process sees
    seed: int = 0  # already derived for this role and rank
    deterministic: bool = False  # equal inputs must give equal bits, whatever it costs


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


class Head(StrEnum):
    """What stands on a model's backbone."""

    LM = "lm"  # predicts the next token
    VALUE = (
        "value"  # one number per token, by score.weight [1, H] and score.bias [1] of AutoModelForTokenClassification
    )


@dataclass(frozen=True, slots=True)
class Model:
    """The model of one role: a folder in Hugging Face layout (config, safetensors, tokenizer).

    With ``head=VALUE``, a language-model head in the folder is left out, and a ``score`` that is not there is zeros:
    every value is 0 until the first step, whatever the seed or the number of ranks.
    """

    path: str
    trust_remote_code: bool = False
    head: Head = Head.LM


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
    total_sequences: int
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
    """What every engine can be told; the config class of an engine extends it and gives ``name`` its default."""

    name: str = ""  # of the backend; chosen by engine=NAME
    ranks: int = 1  # processes that share one copy of the model or more; above 1 under executor=ray
    python: str = ""  # interpreter of these ranks, under executor=ray; empty: the one that runs the job

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
        """Ranks that hold a part of each sequence; ``max_tokens_per_gpu`` counts for each of them."""
        return 1

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


@dataclass
class RolloutConfig:
    """What every rollout can be told; the config class of a rollout extends it and gives ``name`` its default."""

    name: str = ""  # of the backend; chosen by rollout=NAME
    replicas: int = 1  # independent copies that share the requests; above 1 under executor=ray
    python: str = ""  # interpreter of these replicas, under executor=ray; empty: the one that runs the job

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


@cache
def open_transport(target: str) -> Transport:
    return resolve(target)()


class ShardingManager(ABC):
    """Moves the weights of one edge (an engine, its rollouts) from the training to the inference layout."""

    @abstractmethod
    async def setup(self) -> None:
        """Prepare the edge and prove, before the first step, that weights arrive."""

    @abstractmethod
    async def sync(self, version: int) -> Metrics:
        """Bring every rollout to ``version``.

        Raises:
            WeightSyncError: a replica did not load everything that was sent.
        """


class Aggregation(StrEnum):
    """How token losses add up to the loss of a step. Core turns it into the column ``loss_weight``."""

    TOKEN_MEAN = "token_mean"  # 1 / valid tokens of the mini-batch
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"  # 1 / (sequences * valid tokens of the sequence)
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"  # 1 / sequences
    CONSTANT = "constant"  # 1 / (sequences * algorithm.constant)


class Algorithm(ABC):
    """What to optimise: data in, columns and a loss out. Owns no process and keeps no state between steps.

    Attributes:
        needs: columns that core adds before :meth:`advantages`: ``ref_logprobs``, ``old_logprobs``, ``values``. Core
            leaves ``old_logprobs`` out where they equal the current ones (one optimizer step per batch): a loss then
            uses its own log-probs without gradient.
        want: model outputs the loss reads.
        aggregation: how token losses add up.
        constant: divisor per sequence under ``Aggregation.CONSTANT``.
        critic: where ``values`` is needed, the loss that the critic trains with: ``package.module:Class`` of an
            Algorithm that wants ``Output("values")``. It gets the same config, and reads what :meth:`advantages` added.
    """

    needs: frozenset[str] = frozenset()
    want: tuple[Output, ...] = (Output("logprobs"),)
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: int = 1
    critic: str = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def advantages(self, batch: Batch) -> Batch:
        """Add the token column ``advantages`` (and what else the loss reads). On the controller, in NumPy."""

    @abstractmethod
    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return losses per token ``[T]``, not normalised, and metrics. In the engine, in its tensor library."""

    def keep(self, group: Batch) -> bool:
        """Return False to reject a scored prompt group (dynamic sampling): core then asks for another."""
        return True

    def controller(self) -> Controller | None:
        """Return a new controller of what this algorithm adapts from step to step, if there is anything."""
        return None


class Controller(ABC):
    """A coefficient that follows a measurement from step to step. The trainer owns it, and a checkpoint holds it."""

    @abstractmethod
    def apply(self, batch: Batch) -> Batch:
        """Add the sequence columns that hold what is in force, for the algorithm's ``advantages`` and ``loss``."""

    @abstractmethod
    def update(self, batch: Batch) -> Metrics:
        """Learn from a batch with every needed column, and say what was measured and in force."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """Everything that :meth:`restore` needs; plain JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what :meth:`state` returned."""


class Tracker(ABC):
    """Where the numbers of a run go."""

    def __init__(self, config: Any, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step; must not block for long."""

    def rewind(self, step: int) -> None:
        """The run goes on after ``step``: forget what was recorded of later ones; called before :meth:`log`."""

    def close(self) -> None:
        """Flush."""
