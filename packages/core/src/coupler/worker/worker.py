"""WorkerGroup: call one method on every rank of an engine. Two shapes of call, no decorators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from coupler.batch import Batch
from coupler.batch.columns import ROUTED_EXPERTS
from coupler.config.plain import Section
from coupler.engine_kit.lora_names import random_like
from coupler.errors import CouplerError, WaitTimeout
from coupler.executors import Executor
from coupler.interfaces import (
    LORA,
    Algorithm,
    Columns,
    Endpoint,
    Engine,
    FileHashes,
    Layout,
    Loss,
    Model,
    Named,
    Output,
    Parts,
    Rank,
    SendReceipt,
    StepInfo,
    StepResult,
    WeightUpdate,
    open_transport,
)
from coupler.loop.loss_weight import prepare, step_info
from coupler.metrics import Metric, Metrics, merge, read
from coupler.system.files import writing
from coupler.system.imports import resolve
from coupler.system.process_memory import resident_bytes
from coupler.worker.torch.hf_export import export
from coupler.worker.torch.profiling import NOTHING, Profile

OF_REPLICA = "train_infer/abs_diff_of_replica_"  # and its number


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a rank is built from, in any process: names and plain config, never a class."""

    role: str
    engine: str  # "package.module:Class"
    engine_config: Any
    model: Model
    algorithm: tuple[str, Any] | None  # ("package.module:Class", its config); None for a role that is not trained
    profile: Profile = NOTHING

    def __reduce__(self) -> Any:
        """Cross to another process without the plugins' configuration classes."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["engine_config"] = Section.of(self.engine_config)
        if self.algorithm is not None:
            values["algorithm"] = (self.algorithm[0], Section.of(self.algorithm[1]))
        return _received, (values,)


def _received(values: dict[str, Any]) -> WorkerSpec:
    values["engine_config"] = values["engine_config"].open()
    if values["algorithm"] is not None:
        values["algorithm"] = (values["algorithm"][0], values["algorithm"][1].open())
    return WorkerSpec(**values)


def build_algorithm(spec: WorkerSpec) -> Algorithm | None:
    if spec.algorithm is None:
        return None
    target, config = spec.algorithm
    return resolve(target)(config)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's part of one optimizer step."""

    batch: Batch
    info: StepInfo
    fresh_version: int | None  # the weights are those of this version; None once the step before has changed them
    num_replicas: int = 1  # that sampled the batch


@dataclass(frozen=True, slots=True)
class Trained:
    """What :meth:`WorkerGroup.train` did."""

    metrics: Metrics
    steps: tuple[StepResult, ...]


def _again(mini: MiniBatch, steps_later: int) -> MiniBatch:
    """The same rows, after as many optimizer steps."""
    return replace(mini, info=replace(mini.info, index=mini.info.index + steps_later), fresh_version=None)


class Worker:
    """Hosts one Engine in one process."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.role, self.profile = spec.role, spec.profile
        self.engine: Engine = resolve(spec.engine)(spec.engine_config, spec.model)
        self.algorithm = build_algorithm(spec)

    def setup(self, rank: Rank) -> Layout:
        self.rank = rank
        return self.engine.setup(rank)

    def forward(self, batch: Batch, want: tuple[Output, ...]) -> dict[str, np.ndarray]:
        done = self.engine.forward(batch, want)
        return {output.name: done[output.name] for output in want}

    def train(self, mini_batches: list[MiniBatch]) -> Trained:
        """One call from the controller, however many optimizer steps it takes."""
        assert self.algorithm, f"role {self.role} is not trained"
        metrics: list[Metrics] = []
        steps: list[StepResult] = []
        for mini in mini_batches:
            loss = checked_loss(self.algorithm, mini.fresh_version, mini.num_replicas)
            with self.profile.of(self.role, self.rank.index, mini.info.index):
                metrics.append(self.engine.forward_backward(mini.batch, self.algorithm.want, loss, mini.info))
                steps.append(self.engine.step())
        return Trained(read(merge(metrics)), tuple(steps))

    def bind(self, transport: str) -> Endpoint:
        return open_transport(transport).bind(self.rank)

    def push(self, update: WeightUpdate) -> SendReceipt:
        """Send the engine's weights; the receipt names the least precise dtype that travelled."""
        dtypes: set[str] = set()

        def stream() -> Iterator[Named]:
            for name, tensor in self._sent(update):
                dtypes.add(str(tensor.dtype))
                yield name, tensor

        receipt = update.open().send(stream(), update, self.rank)
        half = sorted(d for d in dtypes if "16" in d or "8" in d)
        return replace(receipt, dtype=(half or sorted(dtypes) or [""])[0])

    def _sent(self, update: WeightUpdate) -> Iterator[Named]:
        if update.adapter:
            sent = self.engine.adapter_weights()
            return ((name, random_like(name, tensor)) for name, tensor in sent) if update.permuted else sent
        sent = self.engine.base_weights() if update.format == LORA else self.engine.weights()
        return ((name, reverse_elements(tensor)) for name, tensor in sent) if update.permuted else sent

    def export(self, folder: Path, source: Path) -> int:
        return export(self.engine.weights(), folder, source, self.engine.model.head, write=self.rank.index == 0)

    def save(self, folder: Path, what: Parts) -> None:
        """Start a save; :meth:`saved` says when it is done."""
        self.saved_as = f"the checkpoint {folder}"
        with writing(self.saved_as, SafetensorError):
            self.saving = self.engine.save(folder, what)

    def saved(self) -> FileHashes | None:
        """None while the last save is under way; raises what made it fail. Does not wait."""
        try:
            with writing(self.saved_as, SafetensorError):
                return self.saving.wait(0) or {}
        except WaitTimeout:
            return None

    def host_bytes(self) -> int:
        """Memory of this process on its host."""
        return resident_bytes()

    def do(self, method: str, *args: Any) -> Any:
        """Call a plain method of the engine: load, offload, onload."""
        return getattr(self.engine, method)(*args)


def checked_loss(algorithm: Algorithm, fresh_version: int | None, num_replicas: int = 1) -> Loss:
    """Wrap an algorithm's loss: refuse what is not one loss per token, and measure train against inference.

    Raises (in the engine):
        CouplerError: the loss is a scalar, or has another shape than ``[T]``.
    """

    def loss(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        token_loss, metrics = algorithm.loss(out, batch)
        weight = batch["loss_weight"]
        if tuple(token_loss.shape) != tuple(weight.shape):
            raise CouplerError(
                f"the loss of {type(algorithm).__name__} has shape {list(token_loss.shape)}, "
                f"expected one loss per token, {list(weight.shape)}.\n"
                "  return losses that are not summed or averaged: core normalises them by algorithm.aggregation"
            )
        total = Metric((_detached(token_loss) * weight).sum(), how="sum")
        return token_loss, {"loss": total, **metrics, **mismatch(out, batch, fresh_version, num_replicas)}

    return loss


def mismatch(out: Columns, batch: Columns, fresh_version: int | None, num_replicas: int = 1) -> Metrics:
    """Compare the log-probs of engine and rollout on tokens that the current weights sampled: the probe of a sync.

    Where several replicas sampled, also for each: one that is wrong hardly moves the mean of many.
    """
    if fresh_version is None or "rollout_logprobs" not in batch:
        return {}
    fresh = (batch["version"] == fresh_version) & batch["loss_mask"]
    diff = (_detached(out["logprobs"]) - batch["rollout_logprobs"]) * fresh
    found = differences(diff, fresh.sum(), fresh)
    if num_replicas > 1:
        sampled_by = batch["replica"][batch["seq"]]
        for replica in range(num_replicas):
            mine = fresh & (sampled_by == replica)
            found[f"{OF_REPLICA}{replica}"] = Metric(abs(diff * mine).sum(), mine.sum())
    return found


def differences(diff: Any, count: Any, counts: Any = 1) -> Metrics:
    """What ``train_infer/*`` say of ``diff``, the log of ``r = train / infer`` [T], over ``count`` tokens.

    ``train_infer/ratio`` is the mean of r, whose expectation under the rollout's distribution is 1 where both are over
    the same tokens; ``train_infer/kl`` estimates KL(infer || train) per token by ``r - 1 - log r`` (Schulman 2020,
    "Approximating KL divergence", k3), in nats.

    Args:
        counts: [T] which tokens these are; ``diff`` is 0 for the others.
    """
    ratio = np.e**diff
    return {
        "train_infer/kl": Metric(abs(ratio - 1 - diff).sum(), count),  # k3 >= 0 but for rounding
        "train_infer/ratio": Metric((ratio * counts).sum(), count),
        "train_infer/ratio_max": _most(ratio * counts),
        "train_infer/abs_diff": Metric(abs(diff).sum(), count),
        "train_infer/abs_diff_max": _most(abs(diff)),
    }


def _most(column: Any) -> Metric:
    return Metric(column.max() if len(column) else 0.0, how="max")


def _detached(tensor: Any) -> Any:
    return tensor if isinstance(tensor, np.ndarray) else tensor.detach()


def reverse_elements(tensor: Any) -> Any:
    """The same shape with all elements in reverse order: weights that cannot be mistaken for the true ones."""
    flat = tensor.reshape(-1)
    flat = flat[::-1] if isinstance(flat, np.ndarray) else flat.flip(0)
    return flat.reshape(tensor.shape)


class WorkerGroup:
    """The controller's view of one engine."""

    def __init__(self, executor: Executor, spec: WorkerSpec, ranks: list[Rank]) -> None:
        self.executor, self.spec = executor, spec
        self.algorithm = build_algorithm(spec)
        python = spec.engine_config.python
        self.placed = ranks
        self.ranks = [executor.spawn(spec.role, r.index, "coupler.worker.worker:Worker", spec, python) for r in ranks]
        self.steps_done = 0

    async def setup(self) -> None:
        self.placed = await self.executor.locate(self.ranks, self.placed)
        layouts = await self.executor.each(self.ranks, "setup", [(rank,) for rank in self.placed])
        self.layout: Layout = layouts[0]

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Same arguments to every rank; one result per rank."""
        return await self.executor.each(self.ranks, method, [args] * len(self.ranks))

    async def push(self, update: WeightUpdate) -> list[SendReceipt]:
        """Send the weights from every rank, while the caller's thread serves those who receive them."""
        return await self.executor.each(self.ranks, "push", [(update,)] * len(self.ranks), aside=True)

    async def scatter(self, method: str, shards: Iterable[Any], *args: Any) -> list[Any]:
        """Shard ``i`` to every rank that reads it; one result per shard, in order.

        A rank is called as soon as its shard is made, while the next one is.
        """
        sent: list[Any] = []
        made = map(self.executor.put, shards)

        def shard(index: int) -> Any:
            sent.extend(islice(made, max(index + 1 - len(sent), 0)))
            return sent[index]

        arguments = ((shard(i), *args) for i in self.layout.shard_of)
        answers = await self.executor.each(self.ranks, method, arguments)
        done = zip(self.layout.shard_of, answers, self.layout.answers, strict=True)
        answered = {shard: result for shard, result, answers in done if answers}
        return [answered[i] for i in range(self.layout.num_shards)]

    async def forward(self, batch: Batch, want: tuple[Output, ...]) -> dict[str, np.ndarray]:
        """Columns in the order of ``batch``, one per wanted output."""
        read = ("tokens", "loss_mask", "temperature", "group", ROUTED_EXPERTS)
        needed = batch.select(*(name for name in read if batch.has(name)))
        rows = needed.partition(self.layout.num_shards)
        answers = await self.scatter("forward", needed.split(rows), want)
        return {o.name: needed.join(rows, [answer[o.name] for answer in answers]) for o in want}

    async def train(self, batch: Batch, num_steps: int, version: int | None, epochs: int = 1) -> Trained:
        """Take ``num_steps`` optimizer steps, each over an equal part of the rows, and so for every epoch.

        Mini-batches come first and shards second, so that each step has one global normalisation.
        """
        assert self.algorithm, f"role {self.spec.role} is not trained"
        shards: list[list[MiniBatch]] = [[] for _ in range(self.layout.num_shards)]
        num_replicas = 1 + int(batch["replica"].max()) if batch.has("replica") else 1
        for i, rows in enumerate(np.array_split(np.arange(len(batch)), num_steps)):
            mini = prepare(batch.take(rows), self.algorithm)
            info = step_info(mini, self.steps_done + i)
            for shard, part in zip(shards, mini.split(mini.partition(len(shards))), strict=True):
                shard.append(MiniBatch(part, info, version if i == 0 else None, num_replicas))
        for epoch in range(1, epochs):
            for shard in shards:
                shard += [_again(mini, epoch * num_steps) for mini in shard[:num_steps]]
        answers: list[Trained] = await self.scatter("train", shards)
        total = num_steps * epochs
        self.steps_done += total
        metrics = merge(answer.metrics for answer in answers)
        metrics["loss"] = Metric(metrics["loss"].total / total, how="sum")  # a sum over ranks, a mean over steps
        return Trained(metrics, answers[0].steps)
