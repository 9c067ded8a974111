"""Time of a weight sync into rollout=vllm, next to a plain copy of the bytes.

    python benchmarks/weight_sync.py --shape 1.5b --transport ipc           # same GPU, two processes
    python benchmarks/weight_sync.py --shape 7b --transport nccl            # engine on GPU 0, vLLM on GPU 1
    python benchmarks/weight_sync.py --shape tiny --transport tcp           # anywhere

The sender holds random weights under the names of the checkpoint, as an engine yields them. A round changes them,
pushes them, and compares a fingerprint of all elements on both sides. "Copy" is one device-to-device copy of the same
bytes (with nccl: a peer-to-peer copy to the other GPU), "extra" the most memory the sync took on the sender's side.
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

import torch
from shapes import SHAPES, checkpoint_shapes, write_shape

from coupler.interfaces import InFlight, Model, Named, Rank
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Edge
from coupler.testing.subject import configured, parse_settings
from coupler_rollout_vllm.config import VLLMConfig
from coupler_rollout_vllm.rollout import VLLMRollout
from coupler_rollout_vllm.worker import fingerprint

SMALL = {"enforce_eager": True, "kv_cache_gib": 1.0, "max_model_len": 2048}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Weights:
    """What an engine would hold."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        self.tensors = {name: torch.randn(shape, device=DEVICE).to(dtype) * 0.02 for name, shape in shapes.items()}
        self.num_bytes = sum(t.nbytes for t in self.tensors.values())

    def stream(self) -> Iterator[Named]:
        yield from self.tensors.items()

    def change(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(0.001)

    def fingerprint(self) -> list[int]:
        return fingerprint(self.tensors.values())


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


async def measure(folder: Path, transport: str, settings: dict[str, object], rounds: int) -> None:
    apart = transport == "nccl" and DEVICE == "cuda"
    weights = Weights(checkpoint_shapes(folder))
    copied = copy_seconds(weights.num_bytes, "cuda:1" if apart else DEVICE)
    torch.cuda.empty_cache()
    if apart:  # of the engine's processes, which start later
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    rollout = VLLMRollout(configured(VLLMConfig, {**SMALL, **settings}), Model(str(folder)))
    edge = Edge(Plugins.load().get("transport", transport), rollout, await rollout.setup(Rank(seed=1)))
    await rollout.pause(InFlight.DRAIN)
    times, extra = [], 0
    for _ in range(rounds + 2):
        weights.change()
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        start = time.perf_counter()
        _, receipt = await edge.push(weights.stream())
        times.append(time.perf_counter() - start)
        if DEVICE == "cuda":
            extra = max(extra, torch.cuda.max_memory_allocated() - before)
        assert not receipt.missing and not receipt.unexpected, receipt
        if DEVICE == "cuda":  # on the CPU the layers keep their weights packed, out of sight
            assert (await rollout.fingerprints())[0] == weights.fingerprint(), "what arrived is not what was sent"
    found = times[2:]
    sync = statistics.median(found)
    print("| transport | GB | sync, ms (median; all) | first, ms | copy, ms | sync / copy | GB/s | extra, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    every = ", ".join(f"{1e3 * seconds:.0f}" for seconds in found)
    print(
        f"| {transport} | {weights.num_bytes / 1e9:.2f} | {1e3 * sync:.1f} ({every}) "
        f"| {1e3 * times[0]:.0f} | {1e3 * copied:.1f} | {sync / copied:.2f} | {weights.num_bytes / sync / 1e9:.1f} "
        f"| {extra / 2**20:.0f} |"
    )
    rollout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--transport", default="ipc")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("settings", nargs="*", help="rollout.KEY=VALUE")
    args = parser.parse_args()
    settings = parse_settings(args.settings).get("rollout", {})
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(write_shape(Path(folder), args.shape), args.transport, settings, args.rounds))


if __name__ == "__main__":
    main()
