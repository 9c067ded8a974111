"""Time of a weight sync into one of our rollouts, and of its sleep and wake, next to
plain copies of the bytes.

    python benchmarks/weight_sync.py --shape 1.5b --transport ipc           # same GPU,
    two processes python benchmarks/weight_sync.py --shape 7b --transport nccl
    # engine on GPU 0, vLLM on GPU 1 python benchmarks/weight_sync.py --shape 7b
    --adapter 32                # and an adapter of rank 32 alone python
    benchmarks/weight_sync.py --shape tiny --transport tcp           # anywhere

The sender holds random weights under the names of the checkpoint, as an engine yields
them. A round changes them, pushes them; the first and the last compare a checksum of
every tensor on both sides. "Copy" is one device-to-device copy of the same bytes (with
nccl: a peer-to-peer copy to the other GPU), "extra" the most memory the sync took on
the sender's side. Then the rollout sleeps and wakes, next to a copy of the bytes to
pinned host memory and back; "residue" is what the device misses while it sleeps,
measured from before it started: PyTorch's caches in the model worker, and the CUDA
context with its libraries.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, checkpoint_shapes, write_shape

from coupler.engine_kit.inference.checksums import checksum
from coupler.engine_kit.lora_names import names_of, random_like
from coupler.interfaces import InFlight, Memory, Model, Named, Rank
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Edge
from coupler.testing.subject import configured, parse_settings

SMALL = {"enforce_eager": True, "kv_cache_gib": 1.0, "max_model_len": 2048}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Weights:
    """What an engine would hold."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        self.tensors = {
            name: torch.randn(shape, device=DEVICE).to(dtype) * 0.02
            for name, shape in shapes.items()
        }
        self.num_bytes = sum(t.nbytes for t in self.tensors.values())

    def stream(self) -> Iterator[Named]:
        yield from self.tensors.items()

    def change(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(0.001)

    def checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}


def copy_seconds(num_bytes: int, target: str) -> float:
    """Median time of one copy of so many bytes."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=DEVICE)
    into = torch.empty_like(source, device=target)
    times = []
    for _ in range(7):
        synchronize()
        start = time.perf_counter()
        into.copy_(source)
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def pinned_seconds(num_bytes: int) -> float:
    """Median time of one copy of so many bytes to pinned host memory and back."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    times = []
    for _ in range(4):
        synchronize()
        start = time.perf_counter()
        host.copy_(source, non_blocking=True)
        source.copy_(host, non_blocking=True)
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def free_bytes(device: int) -> int:
    if DEVICE == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


async def measure(folder: Path, args: argparse.Namespace, settings: dict[str, object]) -> None:
    apart = args.transport == "nccl" and DEVICE == "cuda"
    weights = Weights(checkpoint_shapes(folder))
    copied = copy_seconds(weights.num_bytes, "cuda:1" if apart else DEVICE)
    pinned = pinned_seconds(weights.num_bytes)
    free = free_bytes(int(apart))
    if apart:  # of the engine's processes, which start later
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    backend = Plugins.load().get("rollout", args.rollout)
    adapter = {"max_lora_rank": args.adapter} if args.adapter else {}
    config = configured(backend.config, {**SMALL, **adapter, **settings})
    rollout = backend.load()(config, Model(str(folder)))
    edge = Edge(
        Plugins.load().get("transport", args.transport), rollout, await rollout.setup(Rank(seed=1))
    )
    await rollout.pause(InFlight.DRAIN)
    times, extra = [], 0
    for i in range(args.rounds + 2):
        seconds, more = await push(edge, weights)
        times.append(seconds)
        extra = max(extra, more)
        if DEVICE == "cuda" and i in (
            0,
            args.rounds + 1,
        ):  # on the CPU the layers keep their weights packed
            assert await rollout.checksums() == [weights.checksums()], (
                "what arrived is not what was sent"
            )
    report_sync(args, weights.num_bytes, times, copied, extra)
    if args.adapter:
        await push_adapters(edge, weights, args, statistics.median(times[2:]))
    await sleep_and_wake(rollout, free, int(apart), pinned)
    rollout.close()


async def push(edge: Edge, weights: Weights) -> tuple[float, int]:
    """Change the weights and send them; return seconds and the extra memory of this
    process.
    """
    weights.change()
    synchronize()
    before = 0
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = await timed(edge, weights.stream())
    return seconds, torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0


async def timed(edge: Edge, tensors: Iterator[Named], *, adapter: bool = False) -> float:
    """Send ``tensors``; return seconds until all of them are loaded."""
    start = time.perf_counter()
    sent, receipt = await edge.push(tensors, adapter=adapter)
    seconds = time.perf_counter() - start
    assert not receipt.missing and not receipt.unexpected, receipt
    assert receipt.num_loaded == sent.num_tensors, receipt
    return seconds


def report_sync(
    args: argparse.Namespace, num_bytes: int, times: list[float], copied: float, extra: int
) -> None:
    sync = statistics.median(times[2:])
    every = ", ".join(f"{1e3 * seconds:.0f}" for seconds in times[2:])
    print(
        f"RESULT {args.rollout} sync {args.shape} {args.transport}: {num_bytes / 1e9:.2f} GB in "
        f"{1e3 * sync:.1f} ms ({every}; first "
        f"{1e3 * times[0]:.0f}), copy {1e3 * copied:.1f} ms, {sync / copied:.2f} times the copy "
        f"({sync / (3 * copied + 0.02):.2f} of 3 copies + 20 ms), "
        f"{num_bytes / sync / 1e9:.1f} GB/s, "
        f"{copied / sync:.2f} of the copy's rate, extra {extra / 2**20:.0f} MiB",
        flush=True,
    )


async def push_adapters(
    edge: Edge, weights: Weights, args: argparse.Namespace, whole: float
) -> None:
    """Time what a run with LoRA sends in each step: A and B of every projection, upon
    weights that came once.
    """
    tensors: list[Named] = []
    for name, weight in weights.tensors.items():
        if name.endswith("_proj.weight"):
            shapes = ((args.adapter, weight.shape[1]), (weight.shape[0], args.adapter))
            tensors += (
                (n, random_like(n, weight.new_empty(s)))
                for n, s in zip(names_of(name), shapes, strict=True)
            )
    num_bytes, times = sum(tensor.nbytes for _, tensor in tensors), []
    for _ in range(args.rounds + 2):
        synchronize()
        times.append(await timed(edge, iter(tensors), adapter=True))
    adapter = statistics.median(times[2:])
    print(
        f"RESULT adapter of rank {args.adapter}: {num_bytes / 1e6:.0f} MB in "
        f"{1e3 * adapter:.1f} ms, "
        f"{adapter / whole:.2f} of the sync of all weights",
        flush=True,
    )


async def sleep_and_wake(rollout: Any, free: int, device: int, pinned: float) -> None:
    both, times, residue, held = frozenset(Memory), [], 0, 0
    for _ in range(6):
        start = time.perf_counter()
        await rollout.sleep(both)
        slept = time.perf_counter()
        residue, held = free - free_bytes(device), await rollout.device_bytes()
        again = time.perf_counter()
        await rollout.wake(both)
        times.append((slept - start, time.perf_counter() - again))
    sleep, wake = (statistics.median(column) for column in zip(*times[1:], strict=True))
    print(
        f"RESULT sleep {1e3 * sleep:.1f} ms + wake {1e3 * wake:.1f} ms: "
        f"{(sleep + wake) / pinned:.2f} of a copy of the "
        f"weights to pinned memory and back, {1e3 * pinned:.1f} ms; residue "
        f"{residue / 2**30:.2f} GiB, "
        f"{held / 2**30:.2f} of it PyTorch's in the model worker",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--rollout", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--transport", default="ipc")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--adapter", type=int, default=0, metavar="RANK")
    parser.add_argument("settings", nargs="*", help="rollout.KEY=VALUE")
    args = parser.parse_args()
    settings = parse_settings(args.settings).get("rollout", {})
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(write_shape(Path(folder), args.shape), args, settings))


if __name__ == "__main__":
    main()
