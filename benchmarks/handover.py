"""The hand-over of an engine's memory, against a pinned copy of the same bytes.

    python benchmarks/handover.py                     # one GPU, 1.5B
    python benchmarks/handover.py --shape 0.5b engine.lora_rank=32
    python benchmarks/handover.py --engine megatron
    python benchmarks/handover.py --unprepared        # the first time maps host memory
    python benchmarks/handover.py --calls             # of CUDA in a step, by their time
    python benchmarks/handover.py --shape tiny        # anywhere, without the bound

Everything that an engine of one rank holds leaves the device and comes back, as with
``offload=true``. The bound is one copy of as many bytes between the device and one
pinned buffer. The engine leaves before its first step, as it does when the rollout
starts, so that the host memory of its optimizer is prepared in a thread. The first time
is then the one after that step. A step is trained by turns where the engine stays, and
where it comes back before and leaves after. Random weights. Seconds are medians, least
and most.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory_plan import LOGPROBS, batch_of, surprise, write_weights
from shapes import SHAPES, write_shape
from sides import spread

from coupler.batch import Batch
from coupler.engine_kit.pinned import GIB
from coupler.interfaces import EVERYTHING, Model, Rank, StepInfo
from coupler.plugins.manager import Plugins
from coupler.testing.subject import configured, parse_settings

GPU = torch.cuda.is_available()
WHOLE = {"fsdp": "false", "megatron": "none"}
"""The value of engine.gradient_checkpointing with which no activation is computed
again."""
LENGTH = 1024


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the device has done it."""
    if GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def copies(size: int, rounds: int, back: bool) -> list[float]:
    """Return the seconds of copies of ``size`` bytes to the host, or back from it."""
    pair = [
        torch.empty(size, dtype=torch.uint8, device="cuda"),
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
    ]
    source, target = reversed(pair) if back else pair
    return [timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(rounds)]


def ways(engine: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what moves everything to the host, and back. On the CPU it moves too."""
    park, unpark = (engine.offload, engine.onload) if GPU else (engine._park, engine._unpark)
    return lambda: park(EVERYTHING), lambda: unpark(EVERYTHING)


class Way:
    """One way of a hand-over: its seconds, and the bytes that it copied each time."""

    def __init__(self, engine: Any, move: Callable[[], object]) -> None:
        self.engine, self.move = engine, move
        self.seconds: list[float] = []
        self.size = 0

    def __call__(self) -> None:
        before = self.engine._parked.copied
        self.seconds.append(timed(self.move))
        self.size = self.engine._parked.copied - before

    def report(self, what: str, copies: list[float]) -> None:
        """Print it beside pinned copies of as many bytes, where there are some."""
        first, *later = self.seconds
        print(f"{what}: {self.size / GIB:.2f} GiB in {spread(later)} s, first {first:.3f} s")
        if copies:
            one = statistics.median(copies)
            print(f"  a pinned copy: {spread(copies)} s, {self.size / one / 1e9:.1f} GB/s")
            print(f"RESULT {what} {statistics.median(later) / one:.2f}, first {first / one:.2f}")


def start(engine: Any) -> None:
    """Let the engine leave before its first step and come back.

    Print the seconds of that, and those until a thread has prepared the rest.
    """
    park, unpark = ways(engine)
    before = engine._parked.allocated
    left = timed(park)
    waited = timed(lambda: [each.exception(600) for each in engine._parked._preparing.values()])
    size = engine._parked.allocated - before
    timed(unpark)
    print(f"the start: {left:.3f} s to leave, and {waited:.3f} s more until a thread had prepared")
    print(f"  the memory of the first step's optimizer; {size / GIB:.2f} GiB with the parameters")


def train(engine: Any, batch: Batch) -> None:
    """Train a step."""
    engine.forward_backward(batch, LOGPROBS, surprise, StepInfo(batch.num_tokens, 0))
    assert engine.step().applied


def steps(engine: Any, batch: Batch, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of a step where the engine stays, and of one with its
    hand-over, by turns.
    """
    park, unpark = ways(engine)

    train_here = partial(train, engine, batch)

    def train_between() -> None:
        unpark()
        train_here()
        park()

    resident, shared = [], []
    timed(train_here)
    for _ in range(rounds):
        resident.append(timed(train_here))
        park()
        shared.append(timed(train_between))
        unpark()
    return resident, shared


def show_calls(engine: Any, batch: Batch) -> None:
    """Print the calls of CUDA in a step that stays, and in one with its hand-over."""
    park, unpark = ways(engine)
    train_here = partial(train, engine, batch)
    train_here()
    calls("calls of a step that stays", train_here)
    park()
    calls("calls on the way back", unpark)
    calls("calls of a step after it", train_here)
    calls("calls on the way to the host", park)
    unpark()


def calls(what: str, work: Callable[[], object]) -> None:
    """Print the calls of CUDA's runtime that take most of the host's time in ``work``,
    and how often memory was asked of the driver and given back.
    """
    counts = ("num_device_alloc", "num_device_free", "num_alloc_retries")
    before = torch.cuda.memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        seconds = timed(work)
    after = torch.cuda.memory_stats()

    found = [each for each in profile.key_averages() if each.key.startswith("cuda")]
    print(
        f"{what}: {seconds:.3f} s, "
        + ", ".join(f"{name} {after[name] - before[name]}" for name in counts)
    )
    for each in sorted(found, key=lambda each: -each.self_cpu_time_total)[:6]:
        print(f"  {each.key}: {each.count} calls, {each.self_cpu_time_total / 1e6:.3f} s")


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Print the table of one shape."""
    backend = Plugins.load().get("engine", arguments.engine)
    whole = f"engine.gradient_checkpointing={WHOLE[arguments.engine]}"
    given = parse_settings([whole, *arguments.settings])
    engine: Any = backend.load()(configured(backend.config, given["engine"]), Model(str(folder)))
    engine.setup(Rank())
    if not arguments.unprepared:
        start(engine)
    vocabulary = int(SHAPES[arguments.shape]["vocab_size"])
    lengths = np.full(max(arguments.tokens // LENGTH, 1), LENGTH)
    batch = batch_of(vocabulary, 0, lengths)
    train(engine, batch)

    park, unpark = (Way(engine, move) for move in ways(engine))
    for _ in range(arguments.rounds + 1):
        # As after a step, which writes to all that it trains.
        engine._parked.forget()
        park()
        unpark()
    resident, shared = steps(engine, batch, arguments.rounds)
    if arguments.calls:
        show_calls(engine, batch)
    print(f"{engine._parked.allocated / GIB:.2f} GiB of host memory")
    print(f"a step that stays: {spread(resident)} s; with its hand-over: {spread(shared)} s")
    print(f"RESULT step {statistics.median(shared) / statistics.median(resident):.3f}")

    engine.offload(EVERYTHING)
    for what, way, back in (("to the host", park, False), ("back", unpark, True)):
        way.report(what, copies(way.size, arguments.rounds, back) if GPU else [])
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="fsdp", choices=WHOLE)
    parser.add_argument("--shape", default="1.5b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", action="store_true", help="print CUDA's, on a GPU")
    parser.add_argument("--unprepared", action="store_true", help="train before it leaves at all")
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()

    device = torch.cuda.get_device_name() if GPU else platform.processor() or "CPU"
    print(f"{device}; torch {torch.__version__}; {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory() as name:
        folder = write_shape(Path(name), arguments.shape)
        write_weights(0, str(folder))
        measure(arguments, folder)


if __name__ == "__main__":
    main()
