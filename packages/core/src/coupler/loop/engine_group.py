"""Let the controller see the ranks of an engine as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import OF_ENGINES
from coupler.executors import Executor
from coupler.interfaces import (
    Endpoint,
    FileHashes,
    Layout,
    Output,
    Parts,
    Rank,
    SendReceipt,
    WeightUpdate,
)
from coupler.loop.loss_weight import prepare, step_info
from coupler.metrics import Metric, merge
from coupler.worker.spec import MiniBatch, Trained, WorkerSpec, build_algorithm

WORKER = "coupler.worker.worker:Worker"


def _again(mini: MiniBatch, steps_later: int) -> MiniBatch:
    """Return the same rows for a pass that comes ``steps_later``."""
    info = replace(mini.info, index=mini.info.index + steps_later)
    return replace(mini, info=info, fresh_version=None)


def _mini_batches(batch: Batch, number: int) -> Iterator[np.ndarray]:
    """Yield the rows of each mini-batch, in their order."""
    first, of_row = batch.trajectories()
    for part in np.array_split(np.argsort(first), number):
        yield np.flatnonzero(np.isin(of_row, part))


class EngineGroup:
    """One engine, as the controller sees it."""

    def __init__(
        self, executor: Executor, spec: WorkerSpec, ranks: list[Rank], worker: str = WORKER
    ) -> None:
        self.executor, self.spec = executor, spec
        self.algorithm = build_algorithm(spec)
        python = spec.engine_config.python
        self.placed = ranks
        self.ranks = [executor.spawn(spec.role, rank.index, worker, spec, python) for rank in ranks]
        self.steps_done = 0
        self.is_set_up = asyncio.Event()

    async def setup(self) -> None:
        """Place every rank, load the model there, and learn how the ranks read data."""
        self.placed = await self.executor.locate(self.ranks, self.placed)
        layouts = await self.executor.each(self.ranks, "setup", [(rank,) for rank in self.placed])
        self.layout: Layout = layouts[0]
        self.is_set_up.set()

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank with these arguments, and return all results."""
        return await self.executor.each(self.ranks, method, [args] * len(self.ranks))

    async def bind(self, transport: str) -> list[Endpoint]:
        """Open ``transport`` on each rank once it is set up, and return its address."""
        await self.is_set_up.wait()
        return await self.all("bind", transport)

    async def offload(self, what: Parts) -> None:
        """Move ``what`` of every rank from its device to its host."""
        await self.all("offload", what)

    async def onload(self, what: Parts) -> None:
        """Undo :meth:`offload`."""
        await self.all("onload", what)

    async def device_bytes(self) -> int:
        """Return the device memory of the rank that holds most."""
        return max(await self.all("device_bytes"))

    async def host_bytes(self) -> int:
        """Return the host memory of the rank that holds most."""
        return max(await self.all("host_bytes"))

    async def load(self, folder: Path, what: Parts) -> None:
        """Read a folder of :meth:`save` on every rank."""
        await self.all("load", folder, what)

    async def save(self, folder: Path, what: Parts) -> None:
        """Start to write ``what`` into the existing ``folder``, on every rank."""
        await self.all("save", folder, what)

    async def saved(self) -> list[FileHashes | None]:
        """Return the hashes of each rank's files, or None if it still writes."""
        return await self.all("saved")

    async def export(self, folder: Path, source: Path) -> None:
        """Write the weights to ``folder``, with the other files of ``source``."""
        await self.all("export", folder, source)

    async def push(self, update: WeightUpdate) -> list[SendReceipt]:
        """Send the weights from every rank, each on a thread beside the caller's."""
        return await self.executor.each(
            self.ranks, "push", [(update,)] * len(self.ranks), aside=True
        )

    async def scatter(self, method: str, shards: Iterable[Any], *args: Any) -> list[Any]:
        """Send each shard to the ranks that read it, and return one result per shard.

        A rank is called as soon as its shard is made, while the next shard is made.
        """
        sent: list[Any] = []
        made = map(self.executor.put, shards)

        def shard(index: int) -> Any:
            sent.extend(islice(made, max(index + 1 - len(sent), 0)))
            return sent[index]

        arguments = ((shard(i), *args) for i in self.layout.shard_of)
        answers = await self.executor.each(self.ranks, method, arguments)

        done = zip(self.layout.shard_of, answers, self.layout.answers, strict=True)
        answered = {shard: result for shard, result, has_answer in done if has_answer}
        return [answered[i] for i in range(self.layout.num_shards)]

    async def forward(self, batch: Batch, want: tuple[Output, ...]) -> dict[str, np.ndarray]:
        """Return one column per wanted output, in the order of ``batch``."""
        read = ("tokens", "loss_mask", "temperature", "group", *OF_ENGINES)
        needed = batch.select(*(name for name in read if batch.has(name)))
        rows = needed.partition(self.layout.num_shards)
        answers = await self.scatter("forward", needed.split(rows), want)
        names = [output.name for output in want]
        return {name: needed.join(rows, [answer[name] for answer in answers]) for name in names}

    async def train(
        self, batch: Batch, num_steps: int, version: int | None, epochs: int = 1
    ) -> Trained:
        """Take ``num_steps`` optimizer steps per epoch, each over an equal part of the
        trajectories.

        The batch is cut into mini-batches first and into shards second, so that each
        step has one global normalisation. A trajectory stays in one mini-batch. There
        are fewer steps where there are fewer trajectories: none is without one.
        """
        assert self.algorithm, f"role {self.spec.role} is not trained"
        num_steps = min(num_steps, len(batch.trajectories()[0]))
        shards: list[list[MiniBatch]] = [[] for _ in range(self.layout.num_shards)]
        num_replicas = 1 + int(batch["replica"].max()) if batch.has("replica") else 1
        for i, rows in enumerate(_mini_batches(batch, num_steps)):
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
        # the loss is a sum over ranks and a mean over steps
        metrics["loss"] = Metric(metrics["loss"].total / total, how="sum")
        return Trained(metrics, answers[0].steps)
