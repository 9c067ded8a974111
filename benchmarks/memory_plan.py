r"""The memory that ``coupler plan --memory`` foresees, next to what is then measured.

    python benchmarks/memory_plan.py 1.5b engine.gradient_checkpointing=false
    python benchmarks/memory_plan.py 1.5b engine.recompute_num_layers=14
    python benchmarks/memory_plan.py 7b --gpus 4 --micro-batches 2
    python benchmarks/memory_plan.py 7b --gpus 2 --engine megatron \
        engine.tensor_parallel=2
    python benchmarks/memory_plan.py 1.5b --rollout hf rollout.kv_cache_gib=8
    python benchmarks/memory_plan.py 1.5b --rollout sglang rollout.kv_cache_gib=8
    python benchmarks/memory_plan.py tiny --tokens 512 --length 128       # the CPU

Random weights. "held" is what stays between calls, and each phase is what it takes on
top, on the rank that takes most: on a GPU by torch.cuda.max_memory_allocated, on the
CPU by the profiler's record of allocations (without "held"). Of engines in other
processes, as vLLM's, the driver says what is in use on the device, also while they
sleep, so that nothing else may run there. The last lines are ``RESULT``, with the
planned and the measured GiB of a phase and their ratio. The aim is 0.85 to 1.15.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shapes import SHAPES, write_shape
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coupler.batch import Batch
from coupler.engine_kit.json_files import read_json
from coupler.engine_kit.memory_plan import GIB, Asked, Needs, Phase, total
from coupler.engine_kit.rendezvous import keep_port
from coupler.interfaces import EVERYTHING, Memory, Model, Output, Rank, Request, StepInfo
from coupler.plugins.manager import Plugins
from coupler.testing.memory import peak_bytes
from coupler.testing.subject import configured, parse_settings

LOGPROBS = (Output("logprobs"),)
GPU = torch.cuda.is_available()


def surprise(outputs: Any, _: Any) -> Any:
    return -outputs["logprobs"], {}


def model_of(folder: str, device: str) -> PreTrainedModel:
    """A model with random weights, in bf16."""
    with torch.device(device):
        shape = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(
            shape, dtype=torch.bfloat16, trust_remote_code=False
        )


def write_weights(_rank: int, folder: str) -> None:
    """Random weights, in a process whose memory is free again."""
    torch.manual_seed(0)
    model_of(folder, "cuda" if GPU else "cpu").save_pretrained(folder)


def batch_of(vocabulary: int, seed: int, lengths: np.ndarray) -> Batch:
    """Random tokens, all but the first of each sequence trained."""
    random, count = np.random.default_rng(seed), int(lengths.sum())
    mask = np.ones(count, bool)
    mask[np.cumsum(lengths) - lengths] = False
    columns = {
        "tokens": random.integers(0, vocabulary, count).astype(np.int32),
        "loss_mask": mask,
        "loss_weight": (mask / mask.sum()).astype(np.float32),
    }
    return Batch(lengths, columns)


def asked_of(args: argparse.Namespace, folder: str, path: str, **facts: Any) -> Asked:
    shape = read_json(Path(folder) / "config.json")
    size = torch.cuda.get_device_properties(0).total_memory if GPU else 0
    known = {"gpu": GPU, "device_bytes": size, "longest": args.length, **facts}
    return Asked(path=path, model=Model(folder), shape=shape, **known)


def run_engine(index: int, args: argparse.Namespace, folder: str, rendezvous: str) -> None:
    """One rank: plan, measure every phase, and print on the first."""
    backend = Plugins.load().get("engine", args.engine)
    given = {"max_tokens_per_gpu": args.tokens, "ranks": args.gpus, "lr": 1e-6}
    config = configured(
        backend.config, {**given, **parse_settings(args.settings).get("engine", {})}
    )
    tokens = args.micro_batches * args.tokens * config.ranks_per_sequence
    needs = config.memory_needs(asked_of(args, folder, "engine", trains=True, tokens=tokens))

    engine = backend.load()(config, Model(folder))
    world = {"index": index, "world": args.gpus, "rendezvous": rendezvous if args.gpus > 1 else ""}
    layout = engine.setup(Rank(**world))
    lengths = np.full(tokens // args.length, args.length)
    batch = batch_of(SHAPES[args.shape]["vocab_size"], layout.shard_of[index], lengths)
    info = StepInfo(tokens * layout.num_shards, 0)

    def train() -> None:
        engine.forward_backward(batch, LOGPROBS, surprise, info)
        assert engine.step().applied

    def save() -> None:
        with tempfile.TemporaryDirectory() as path:
            engine.save(Path(path), EVERYTHING).wait(600)

    train()
    found = {"held": torch.cuda.memory_allocated()} if GPU else {}
    calls: dict[Phase, Callable[[], object]] = {
        Phase.LOGPROBS: lambda: engine.forward(batch, LOGPROBS),
        Phase.TRAINING: train,
        Phase.SYNC: lambda: [None for _ in engine.weights()],
        Phase.SAVING: save,
    }
    found |= {phase: peak_bytes(call) for phase, call in calls.items()}
    found = {name: most(size, args.gpus, engine.device) for name, size in found.items()}
    if index == 0:
        report(args, args.engine, needs, found)
    if args.gpus > 1:
        dist.barrier()
    engine.close()


def most(size: int, ranks: int, device: torch.device) -> int:
    """Return the largest number of all ranks."""
    if ranks == 1:
        return size
    largest = torch.tensor(size, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def run_rollout(args: argparse.Namespace, folder: str) -> None:
    """Plan and measure one replica that samples."""
    backend = Plugins.load().get("rollout", args.rollout)
    config = configured(backend.config, parse_settings(args.settings).get("rollout", {}))
    numbers = sum(tensor.numel() for tensor in model_of(folder, "meta").parameters())
    count = args.micro_batches * args.tokens // args.length
    needs = config.memory_needs(
        asked_of(
            args,
            folder,
            "rollout",
            sequences=count,
            parameters=numbers,
            prompt=args.length // 2,
        )
    )
    half = args.length // 2
    random = np.random.default_rng(0)
    prompts = random.integers(4, SHAPES[args.shape]["vocab_size"], (count, half)).tolist()
    requests = [Request(tuple(prompt), half, seed=i) for i, prompt in enumerate(prompts)]

    with asyncio.Runner() as runner:
        rollout = backend.load()(config.for_run(args.length), Model(folder))
        before, used = (torch.cuda.memory_allocated(), in_use()) if GPU else (0, 0)
        runner.run(rollout.setup(Rank(seed=1)))
        apart = runner.run(rollout.device_bytes())
        held = in_use() - used if apart else torch.cuda.memory_allocated() - before
        found = {"held": held} if GPU else {}

        async def sample() -> None:
            await asyncio.gather(*map(rollout.generate, requests))

        if apart:
            runner.run(sample())
            found[Phase.SAMPLING] = in_use() - used - held
            runner.run(rollout.sleep(frozenset(Memory)))
            found["asleep"] = in_use() - used
        else:
            found[Phase.SAMPLING] = peak_bytes(lambda: runner.run(sample()))
        report(args, args.rollout, needs, found)
        rollout.close()


def in_use() -> int:
    """Return the bytes of the first GPU that any process holds, its CUDA too."""
    return torch.cuda.device_memory_used(0)


def report(args: argparse.Namespace, name: str, needs: Needs, found: dict[str, int]) -> None:
    """Print planned and measured GiB of each phase, side by side."""
    device = torch.cuda.get_device_name() if GPU else "CPU"
    print(f"{name} {args.shape} on {args.gpus} x {device}, torch {torch.__version__}")
    print(f"  {' '.join(args.settings)} {args.micro_batches} x {args.tokens} tokens a step")
    planned = {"held": total(term for terms in needs.held.values() for term in terms)}
    planned |= {phase: total(terms) for phase, terms in needs.peaks.items()}
    planned["asleep"] = total(needs.held.get(None, ()))

    for phase, size in found.items():
        both = planned.get(phase, 0), size
        ratio = both[0] / size if size else float("nan")
        print(
            f"RESULT {phase:12} planned {both[0] / GIB:8.3f}  measured {size / GIB:8.3f} GiB  "
            f"ratio {ratio:.2f}"
        )
    for text in needs.unknown:
        print(f"unknown: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("settings", nargs="*", help="engine.KEY=VALUE or rollout.KEY=VALUE")
    parser.add_argument("--engine", default="fsdp")
    parser.add_argument("--rollout", help="measure a replica of it instead")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a rank's micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    args = parser.parse_intermixed_args()

    port, kept = keep_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder, kept:
        write_shape(Path(folder), args.shape)
        mp.spawn(write_weights, (folder,), nprocs=1)
        if args.rollout:
            run_rollout(args, folder)
            return
        mp.spawn(run_engine, (args, folder, f"127.0.0.1:{port}"), nprocs=args.gpus)


if __name__ == "__main__":
    main()
