"""What core itself costs: one step of five stages over engines that do nothing, 2, 64
and 1,024 of them, inline.

    python benchmarks/empty_step.py [--repeats 20]

The stages: complete (a forward for one column), train (one optimizer step), offload,
onload, push. Every rank has one sequence of one token. Goal: at most 5 ms at 2 workers
and 50 ms at 1,024.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import (
    EVERYTHING,
    Endpoint,
    Engine,
    EngineConfig,
    Layout,
    Model,
    Named,
    Output,
    Rank,
    SendReceipt,
    Shapes,
    StepResult,
    Transport,
    WeightUpdate,
)
from coupler.loop.engine_group import EngineGroup
from coupler.metrics import Metric
from coupler.testing.toy_config import ToyAlgorithmConfig
from coupler.worker.spec import WorkerSpec

HERE = Path(__file__).resolve()
LOGPROBS = (Output("logprobs"),)


class Idle(Engine):
    """Answers at once."""

    def setup(self, rank: Rank) -> Layout:
        return Layout(tuple(range(rank.world)), (True,) * rank.world)

    def forward(self, batch: Batch, want: Any) -> Batch:
        return batch.with_tokens(logprobs=np.zeros(batch.num_tokens, np.float32))

    def forward_backward(self, batch: Batch, want: Any, loss: Any, step: Any) -> dict[str, Metric]:
        return {"loss": Metric(0.0, how="sum")}

    def step(self) -> StepResult:
        return StepResult(applied=True, grad_norm=0.0, lr=0.0)

    def weights(self) -> Iterator[Named]:
        return iter(())

    def gradients(self) -> Iterator[Named]:
        return iter(())

    def save(self, path: Path, what: Any) -> Any:
        raise NotImplementedError

    def load(self, path: Path, what: Any) -> None:
        raise NotImplementedError


class Nowhere(Transport):
    """Carries nothing."""

    def bind(self, rank: Rank) -> Endpoint:
        return Endpoint()

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        return SendReceipt(update.version, len(list(weights)), 0, 0.0)

    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        return iter(())


def make_batch(sequences: int) -> Batch:
    columns = {
        "tokens": np.ones(sequences, np.int32),
        "loss_mask": np.ones(sequences, bool),
        "advantages": np.zeros(sequences, np.float32),
    }
    return Batch(
        np.ones(sequences, np.int64), columns, {"temperature": np.ones(sequences, np.float32)}
    )


async def step(group: EngineGroup, batch: Batch, update: WeightUpdate) -> None:
    column = (await group.forward(batch, LOGPROBS))["logprobs"]
    await group.train(batch.with_tokens(old_logprobs=column), 1, None)
    await group.offload(EVERYTHING)
    await group.onload(EVERYTHING)
    await group.all("push", update)


async def measure(workers: int, repeats: int) -> list[float]:
    algorithm = ("coupler.testing.toy:ToyAlgorithm", ToyAlgorithmConfig())
    spec = WorkerSpec(
        "policy", f"{HERE}:Idle", EngineConfig("idle", ranks=workers), Model(""), algorithm
    )
    executor = Local(inline=True, waits=Waits(60.0, 60.0))
    group = EngineGroup(executor, spec, [Rank(index=i, world=workers) for i in range(workers)])
    await group.setup()
    batch = make_batch(workers)
    update = WeightUpdate(1, "full", f"{HERE}:Nowhere", (), 0, 60.0)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        await step(group, batch, update)
        seconds.append(time.perf_counter() - start)
    executor.close()
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    print("workers  median ms  worst ms")
    for workers in (2, 64, 1024):
        found = sorted(1e3 * s for s in asyncio.run(measure(workers, arguments.repeats)))
        print(f"{workers:7}  {statistics.median(found):9.2f}  {found[-1]:8.2f}")


if __name__ == "__main__":
    main()
