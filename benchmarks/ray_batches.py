"""A batch to two Ray workers and back, against the same bytes as bare NumPy arrays
through Ray in the same run.

    python benchmarks/ray_batches.py [--sequences 1024] [--tokens 4096] [--repeats 5]

Ours is all that :class:`coupler.loop.engine_group.EngineGroup` does: partition rows,
take them, put each shard once, call, join the answers and bring them into the order of
the batch. Bare is ``ray.put`` of two halves of every column, an actor that returns what
it got, and ``ray.get``. Goal: at most 1.3 times bare. Rounds alternate; the medians are
compared.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.config.schema import ExecutorName, RunConfig, WaitsConfig
from coupler.executors import open_executor
from coupler.executors.placement import Role
from coupler.interfaces import Rank

NUM_WORKERS = 2
NUM_COLUMNS = 8
ECHO = f"{Path(__file__).resolve()}:Echo"


class Echo:
    """Returns what it gets, in new memory, as a worker does that computed it."""

    def __init__(self, spec: None) -> None:
        self.spec = spec

    def columns(self, batch: Batch) -> dict[str, np.ndarray]:
        return {name: column.copy() for name, column in batch.tokens.items()}

    def arrays(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [array.copy() for array in arrays]


def make_batch(sequences: int, tokens: int) -> Batch:
    """Ragged lengths around ``tokens``, eight 4-byte columns."""
    random = np.random.default_rng(0)
    lengths = random.integers(tokens // 2, tokens + tokens // 2, sequences)
    total = int(lengths.sum())
    return Batch(
        lengths, {f"column{i}": random.random(total, np.float32) for i in range(NUM_COLUMNS)}
    )


async def ours(executor: Any, handles: list[Any], batch: Batch) -> None:
    rows = batch.partition(NUM_WORKERS)
    answers = await executor.each(
        handles, "columns", ((executor.put(part),) for part in batch.split(rows))
    )
    whole = {name: batch.join(rows, [answer[name] for answer in answers]) for name in batch.tokens}
    assert whole["column7"][-1] == batch["column7"][-1]


async def bare(executor: Any, handles: list[Any], batch: Batch) -> None:
    halves = zip(
        *(np.array_split(column, NUM_WORKERS) for column in batch.tokens.values()), strict=True
    )
    sent = [executor.put(list(half)) for half in halves]
    answers = await asyncio.gather(
        *(
            handle.of.call.remote("arrays", shard)
            for handle, shard in zip(handles, sent, strict=True)
        )
    )
    assert answers[-1][-1][-1] == batch["column7"][-1]


async def measure(executor: Any, batch: Batch, repeats: int) -> dict[str, list[float]]:
    await executor.place([Role("policy", NUM_WORKERS)])
    handles = [executor.spawn("policy", i, ECHO, None) for i in range(NUM_WORKERS)]
    await executor.locate(handles, [Rank(index=i, world=NUM_WORKERS) for i in range(NUM_WORKERS)])
    ways: dict[str, Callable[[Any, list[Any], Batch], Awaitable[None]]] = {
        "bare": bare,
        "ours": ours,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 1):  # the first round maps the object store's memory
        for name, way in ways.items():
            start = time.perf_counter()
            await way(executor, handles, batch)
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    batch = make_batch(arguments.sequences, arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            executor=ExecutorName.RAY, waits=WaitsConfig(deadline_s=300.0), run_dir=folder
        )
        executor = open_executor(config)
        try:
            seconds = asyncio.run(measure(executor, batch, arguments.repeats))
        finally:
            executor.close()
    size = sum(column.nbytes for column in batch.tokens.values())
    print(
        f"{arguments.sequences} sequences, {batch.num_tokens} tokens, {size / 1e6:.0f} MB each way"
    )
    for name, values in seconds.items():
        print(
            f"{name:5} {statistics.median(values):.3f} s  (of "
            f"{', '.join(f'{v:.3f}' for v in sorted(values))})"
        )
    print(
        "ours / bare: "
        f"{statistics.median(seconds['ours']) / statistics.median(seconds['bare']):.2f}"
    )


if __name__ == "__main__":
    main()
