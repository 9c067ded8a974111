"""Save and load of a checkpoint on 2, 1 and 3 ranks of engine=fsdp, against the same
bytes as one raw file per rank.

    python benchmarks/checkpoint.py [--gib 2] [--repeats 5] [--folder DIR]
    python benchmarks/checkpoint.py --gpu     # one rank, its state on a GPU: how long
    the training step stalls

Ours is all that a job does. A save copies the state, writes and hashes it, writes the
manifest, renames the folder and deletes an older one; a load finds the newest
checkpoint, verifies every byte of it and fills the engines. The state is a
transformer's: parameters and two moments in fp32. Both sides write and fsync, or read
with nothing of the files in the page cache, in the same processes and by turns; a time
lasts until the slowest rank is done, and the median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import time
from collections.abc import Awaitable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from coupler.config.schema import CheckpointConfig, Devices, ExecutorName, RayConfig, RunConfig
from coupler.executors import open_executor
from coupler.executors.placement import Role
from coupler.interfaces import EVERYTHING, Model, Rank
from coupler.loop.engine_group import EngineGroup
from coupler.loop.state import State
from coupler.run.checkpoint import Checkpoints, newest
from coupler.worker.spec import WorkerSpec
from coupler.worker.worker import Worker
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine

ENGINE = f"{Path(__file__).resolve()}:Timed"
WORKER = f"{Path(__file__).resolve()}:TimedWorker"
HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 4096, 32_000
LAYER = 4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE


class Timed(FSDPEngine):
    """An engine that also reads and writes raw files of the size of its state."""

    def fill(self) -> int:
        """Make the state random, as a trained one looks to a disk; return its bytes."""
        held = [
            tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for tensor in self.state().values()
        ]
        for tensor in held:
            tensor.copy_(torch.rand(tensor.shape, device=tensor.device))
        size = sum(tensor.nbytes for tensor in held)
        self.raw = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().data
        return size

    def state(self) -> dict[str, Tensor]:
        return {
            name: tensor.detach()
            for name, tensor in self._state(EVERYTHING).items()
            if tensor.is_floating_point()
        }

    def raw_write(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(self.raw)
            file.flush()
            os.fsync(file.fileno())

    def raw_read(self, path: Path) -> None:
        with path.open("rb") as file:
            assert file.readinto(self.raw) == len(self.raw)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class TimedWorker(Worker):
    """A worker that hands the benchmark's own calls to its engine."""

    def timed(self, method: str, *args: Path) -> object:
        return getattr(self.engine, method)(*args)


def write_model(folder: Path, num_bytes: int) -> Path:
    """Write a Qwen2 of random weights whose training state has about ``num_bytes``."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    layers = max(1, round((num_bytes / 12 - VOCABULARY * HIDDEN) / LAYER))
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)
    return folder


def evict(folder: Path) -> None:
    """Drop the files below ``folder`` from the page cache, where the file system lets
    us.
    """
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


async def timed(work: Awaitable[object]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def raw(group: EngineGroup, method: str, folder: Path) -> None:
    await group.executor.each(
        group.ranks, "timed", [(method, folder / str(i)) for i in range(len(group.ranks))]
    )


async def measure(group: EngineGroup, folder: Path, saves: bool, repeats: int) -> dict[str, Any]:
    size = sum(await group.all("timed", "fill"))
    files = folder / f"raw-{len(group.ranks)}"
    files.mkdir()
    found: dict[str, Any] = {"size": size, "saves": [], "loads": [], "stalls": []}
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(), {})

    async def save(step: int) -> None:
        start = time.perf_counter()
        await checkpoints.save(
            step,
            {"policy": group},
            State({}),
            hold=lambda _: nullcontext(),
            values={},
            healthy=True,
        )
        # until here the next step's kernels wait too
        await group.all("timed", "synchronize")
        found["stalls"].append(time.perf_counter() - start)
        await checkpoints.settle()

    async def load() -> None:
        checkpoint, skipped = newest(folder / "checkpoints")
        assert checkpoint and not skipped
        await checkpoint.restore("policy", group)

    for step in range(1, repeats + 1):
        reference = await timed(raw(group, "raw_write", files))
        if saves:
            found["saves"].append((await timed(save(step)), reference))
    for _ in range(repeats):
        evict(files)
        reference = await timed(raw(group, "raw_read", files))
        evict(folder / "checkpoints")
        found["loads"].append((await timed(load()), reference))
    return found


def run(world: int, arguments: argparse.Namespace, saves: bool) -> dict[str, Any]:
    """Start an engine of ``world`` ranks, measure, and end it."""
    devices = Devices.GPU if arguments.gpu else Devices.CPU
    config = RunConfig(
        executor=ExecutorName.RAY, run_dir=str(arguments.folder), ray=RayConfig(devices=devices)
    )
    executor = open_executor(config)
    spec = WorkerSpec("policy", ENGINE, FSDPConfig(), Model(str(arguments.folder / "model")), None)

    async def go() -> dict[str, Any]:
        await executor.place([Role("policy", world)])
        group = EngineGroup(
            executor, spec, [Rank(index=i, world=world) for i in range(world)], WORKER
        )
        await group.setup()
        return await measure(group, arguments.folder, saves, arguments.repeats)

    try:
        return asyncio.run(go())
    finally:
        executor.close()


def line(what: str, size: int, pairs: list[tuple[float, float]]) -> str:
    ours, raw = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    return f"{what:16}  {size / 2**30:6.2f}  {ours:8.3f}  {raw:8.3f}  {ratio:6.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=Path("checkpoint-benchmark"), help="made and removed"
    )
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.absolute()
    arguments.folder.mkdir()
    try:
        write_model(arguments.folder / "model", int(arguments.gib * 2**30))
        print(f"{'':16}  {'GiB':>6}  {'seconds':>8}  {'raw':>8}  {'ratio':>7}")
        for i, world in enumerate((1,) if arguments.gpu else (2, 1, 3)):
            found = run(world, arguments, saves=not i)
            ranks = f"{world} rank{'s' * (world > 1)}"
            if saves := found["saves"]:
                print(line(f"save, {ranks}", found["size"], saves))
                stall = statistics.median(
                    s / save for s, (save, _) in zip(found["stalls"], saves, strict=True)
                )
                print(
                    f"  the caller waits {'':5}  {statistics.median(found['stalls']):8.3f}  "
                    f"{100 * stall:15.1f} %"
                )
            print(line(f"load, {ranks}", found["size"], found["loads"]), flush=True)
    finally:
        shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
