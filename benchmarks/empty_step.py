"""What core itself costs: one step of five stages over engines that do nothing, 2, 64
and 1,024 of them, inline.

    python benchmarks/empty_step.py [--repeats 20] [--against FOLDER]

The stages: complete (a forward for one column), train (one optimizer step), offload,
onload, push. Every rank has one sequence of one token. Goal: at most 5 ms at 2 workers
and 50 ms at 1,024.

With --against, the core of another checkout runs the same steps by turns with this one,
in processes of their own. Printed is the ratio of processor time, ours over theirs: the
median over the rounds, and that of the lowest times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
# With --against: steps of each round, by number of workers.
STEPS = {2: 300, 64: 30}
PAIRS = 9


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


async def measure(
    workers: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds of each step by ``clock``, after one that is not counted."""
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
        start = clock()
        await step(group, batch, update)
        seconds.append(clock() - start)
    executor.close()
    return seconds[1:]


def processor_ms(steps: dict[int, int]) -> dict[int, float]:
    """Return milliseconds of the processor for a step, by number of workers."""
    found = {}
    for workers, repeats in steps.items():
        seconds = asyncio.run(measure(workers, repeats, time.process_time))
        found[workers] = 1e3 * statistics.mean(seconds)
    return found


def compare(other: Path) -> None:
    """Run this core and another one by turns, and print the ratios of their times."""
    roots, rounds = (HERE.parents[1], other.resolve()), []
    for _ in range(PAIRS):
        rounds.append([in_process(root) for root in roots])

    print("workers  ours ms  theirs ms  median ratio  ratio of the lowest")
    for workers in rounds[0][0]:
        ours, theirs = ([turn[side][workers] for turn in rounds] for side in (0, 1))
        median = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(
            f"{workers:>7}  {min(ours):7.3f}  {min(theirs):9.3f}  {median:12.3f}  "
            f"{min(ours) / min(theirs):19.3f}"
        )


def in_process(root: Path) -> dict[str, float]:
    """Measure the core of a checkout, in a process of its own."""
    code = (
        f"import json, sys; sys.path.insert(0, {str(HERE.parent)!r}); import empty_step; "
        f"print(json.dumps(empty_step.processor_ms({STEPS})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root / "packages" / "core" / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--against", type=Path, help="another checkout")
    arguments = parser.parse_args()
    if arguments.against:
        compare(arguments.against)
        return
    print("workers  median ms  worst ms")
    for workers in (2, 64, 1024):
        found = sorted(1e3 * s for s in asyncio.run(measure(workers, arguments.repeats)))
        print(f"{workers:7}  {statistics.median(found):9.2f}  {found[-1]:8.2f}")


if __name__ == "__main__":
    main()
