"""Save and load of a sharded checkpoint on 2, 1 and 3 ranks, against the same bytes as one raw file per rank.

    python benchmarks/checkpoint.py [--gib 2] [--repeats 5] [--folder DIR]
    python benchmarks/checkpoint.py --gpu     # one rank, its state on a GPU: how long the training step stalls

The state is a transformer's: parameters and two moments in fp32. Both sides write and fsync, or read with nothing of
the files in the page cache, in the same processes and by turns; a time is the slowest rank's, and the median counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from coupler_engine_fsdp import checkpoint
from coupler_engine_fsdp.weights import shard_rows

HIDDEN, VOCABULARY = 1024, 32000


def shapes(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """An embedding and as many layers as fill ``num_bytes``, each parameter with two moments."""
    found: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN)}
    layer = {"qkv": (3 * HIDDEN, HIDDEN), "out": (HIDDEN, HIDDEN), "up": (4 * HIDDEN, HIDDEN), "norm": (HIDDEN,)}
    size = 12 * VOCABULARY * HIDDEN
    while size < num_bytes:
        found |= {f"layers.{len(found)}.{name}": shape for name, shape in layer.items()}
        size += 12 * sum(torch.Size(shape).numel() for shape in layer.values())
    return {f"{part}/{name}": shape for part in ("params", "exp_avg", "exp_avg_sq") for name, shape in found.items()}


def state_of(num_bytes: int, mesh: DeviceMesh) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, shape in shapes(num_bytes).items():
        rows = len(shard_rows(shape[0], mesh.size(), mesh.get_local_rank()))
        local = torch.randn(rows, *shape[1:], device=mesh.device_type)
        size = torch.Size(shape)
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=size, stride=torch.empty(size, device="meta").stride()
        )
    return state


def evict(folder: Path) -> None:
    """Drop the files of ``folder`` from the page cache, where the file system lets us."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(work: Callable[[], object]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def raw_write(path: Path, data: memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def raw_read(path: Path, into: memoryview) -> None:
    with path.open("rb") as file:
        assert file.readinto(into) == len(into)


def rank_main(index: int, world: int, port: int, arguments: argparse.Namespace, rows: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if arguments.gpu else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=world)
    mesh = init_device_mesh("cuda" if arguments.gpu else "cpu", (world,))
    state = state_of(int(arguments.gib * 2**30), mesh)
    size = sum(tensor.to_local().nbytes for tensor in state.values())
    data = memoryview(torch.randint(0, 256, (size,), dtype=torch.uint8).numpy())
    saved, raw = arguments.folder / "checkpoint", arguments.folder / f"raw-{world}"
    raw.mkdir(exist_ok=True)
    saves, loads, stalls = [], [], []
    host: dict[str, Tensor] = {}

    def save() -> None:
        start = time.perf_counter()
        pending = checkpoint.save(saved, state, mesh, host)
        if arguments.gpu:
            torch.cuda.synchronize()  # until here the next step's kernels wait too
        stalls.append(time.perf_counter() - start)
        pending.wait(600)

    for _ in range(arguments.repeats):
        reference = timed(lambda: raw_write(raw / str(index), data))
        if world == arguments.saving:
            shutil.rmtree(saved, ignore_errors=True) if index == 0 else None
            dist.barrier()
            saved.mkdir(exist_ok=True)
            saves.append((timed(save), reference))
    for _ in range(arguments.repeats):
        evict(raw), dist.barrier()
        reference = timed(lambda: raw_read(raw / str(index), data))
        evict(saved), dist.barrier()
        loads.append((timed(lambda: checkpoint.load(saved, state)), reference))
    if index == 0:
        rows.put((world, size * world, saves, loads, stalls))
    dist.destroy_process_group()


def line(what: str, size: int, pairs: list[tuple[float, float]]) -> str:
    ours, raw = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    return f"{what:16}  {size / 2**30:6.2f}  {ours:8.3f}  {raw:8.3f}  {ratio:6.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("checkpoint-benchmark"), help="made and removed")
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    arguments.saving = 1 if arguments.gpu else 2
    arguments.folder.mkdir()
    spawn = multiprocessing.get_context("spawn")
    print(f"{'':16}  {'GiB':>6}  {'seconds':>8}  {'raw':>8}  {'ratio':>7}")
    try:
        for world in (1,) if arguments.gpu else (2, 1, 3):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            rows = spawn.Queue()
            ranks = [spawn.Process(target=rank_main, args=(i, world, port, arguments, rows)) for i in range(world)]
            for process in ranks:
                process.start()
            _, size, saves, loads, stalls = rows.get(timeout=3600)
            for process in ranks:
                process.join(60)
            if saves:
                print(line(f"save, {world} rank{'s' * (world > 1)}", size, saves))
                stall = statistics.median(s / save for s, (save, _) in zip(stalls, saves, strict=True))
                print(f"  the caller waits {'':5}  {statistics.median(stalls):8.3f}  {100 * stall:15.1f} %")
            print(line(f"load, {world} rank{'s' * (world > 1)}", size, loads), flush=True)
    finally:
        shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
