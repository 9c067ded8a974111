"""Tokens a second per GPU where k GPUs split sequences of k x L tokens, next to one GPU
at L and to Megatron's context parallelism, in one run.

    python benchmarks/sequence_parallel.py 1.5b --length 32768 --gpus 2
    python benchmarks/sequence_parallel.py tiny --length 64 --rounds 1 --steps 1

Figures are of GPUs. The second command runs anywhere, over gloo on the CPU, and shows
only that the script works. Random weights; a step is forward, log-probs, backward with
recomputed layers, clipping and AdamW with fp32 weights, over one row per data shard. It
is one sequence, or where the case is ``several_sequences`` k of L tokens each. Every
round runs all cases, each in processes of its own, and medians of rounds are printed.
``of_one`` compares tokens a second per GPU with the case ``one``. A sequence k times as
long has k times the attention per token, so that ``of_one_flops`` compares model FLOPs
as well: 6 x parameters x tokens, and causal attention.
``exchange_s`` is what the all-to-alls of a step take when nothing else runs. The last
line is ``RESULT`` and JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sides import free_port
from train_step_megatron import SHAPES, path_parameters, surrogate, timed
from transformers import AutoModelForCausalLM

from coupler.batch import Batch
from coupler.interfaces import Model, Output, Rank, StepInfo
from coupler.plugins.manager import Plugins
from coupler.testing.subject import configured, parse_settings

Case = dict[str, Any]


def cases(gpus: int, settings: dict[str, Any]) -> dict[str, Case]:
    """The engine, ranks and settings of each case."""
    found = {
        "one": {"engine": "fsdp", "ranks": 1, "settings": settings},
        "sequence_parallel": {
            "engine": "fsdp",
            "ranks": gpus,
            "settings": {**settings, "sequence_parallel": gpus},
        },
    }
    found["several_sequences"] = {**found["sequence_parallel"], "sequences": gpus}
    if find_spec("coupler_engine_megatron"):
        found["context_parallel"] = {
            "engine": "megatron",
            "ranks": gpus,
            "settings": {"context_parallel": gpus},
        }
    return found


def write_model(_rank: int, shape: str, folder: str, length: int) -> None:
    """Random weights of a shape that takes sequences of ``length``."""
    config = SHAPES[shape]
    config.max_position_embeddings = length
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    model.save_pretrained(folder)


def one_row(vocabulary: int, length: int, sequences: int, seed: int) -> Batch:
    """A row cut into ``sequences``, whose tokens are all trained but the first."""
    random = np.random.default_rng(seed)
    each = length // sequences
    mask = np.arange(length) % each > 0
    return Batch(
        np.full(sequences, each),
        {
            "tokens": random.integers(0, vocabulary, length).astype(np.int32),
            "loss_mask": mask,
            "loss_weight": (mask / mask.sum()).astype(np.float32),
            "advantages": random.normal(size=length).astype(np.float32),
        },
    )


def run(index: int, case: Case, args: argparse.Namespace, folder: str, rendezvous: str) -> None:
    """One rank: measure, and write what the first one found."""
    ranks, length = case["ranks"], args.length * case["ranks"]
    backend = Plugins.load().get("engine", case["engine"])
    settings = {"lr": 1e-6, "max_tokens_per_gpu": args.length, **case["settings"]}
    engine = backend.load()(configured(backend.config, settings), Model(folder))
    engine.setup(Rank(index=index, world=ranks, rendezvous=rendezvous if ranks > 1 else ""))

    config, info = SHAPES[args.shape], StepInfo(length, 0)
    sequences = case.get("sequences", 1)
    batches = [
        one_row(config.vocab_size, length, sequences, seed) for seed in range(args.steps + 2)
    ]

    def train(batch: Batch) -> None:
        engine.forward_backward(batch, (Output("logprobs"),), surrogate, info)
        assert engine.step().applied

    for batch in batches[:2]:
        train(batch)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timed(lambda b=b: train(b)) for b in batches[2:])

    most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found = {
        "tokens_per_s_per_gpu": args.length / seconds,
        "step_s": seconds,
        "flops": flops(config, length, sequences) / ranks / seconds,
        "most_gib": most / 2**30,
        "exchange_s": exchange(engine, config, args.length),
    }
    if index == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    engine.close()


def flops(config: Any, length: int, sequences: int) -> float:
    """Of forward and backward over a row of sequences; attention looks at half of each
    square.
    """
    width = config.num_hidden_layers * config.num_attention_heads * head_size(config)
    return 6.0 * path_parameters(config) * length + 6.0 * width * length**2 / sequences


def head_size(config: Any) -> int:
    """Elements of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def exchange(engine: Any, config: Any, tokens: int) -> float:
    """Seconds of the all-to-alls of a step, 0 where ranks hold whole sequences.

    Each layer has two, in the forward pass, in its recomputation and in the backward
    pass.
    """
    peers = getattr(engine, "peers", None)
    if peers is None or peers.size == 1:
        return 0.0
    from coupler_engine_fsdp.sequence import swap

    width = head_size(config)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    repeats = peers.size // np.gcd(peers.size, groups)
    total = 0.0
    for columns in ((heads + 2 * repeats * groups) * width, heads * width):
        parts = torch.zeros(
            peers.size, tokens, columns // peers.size, dtype=engine.dtype, device=engine.device
        )
        timed(lambda p=parts: swap(p, peers.group))
        total += statistics.median(timed(lambda p=parts: swap(p, peers.group)) for _ in range(5))
    passes = 3 if engine.config.recomputed is None else 2
    return passes * config.num_hidden_layers * total


def measure(case: Case, args: argparse.Namespace, folder: str) -> dict[str, float]:
    """What the ranks of a case find, in processes whose memory is free again."""
    mp.spawn(run, (case, args, folder, f"127.0.0.1:{free_port()}"), nprocs=case["ranks"])
    return json.loads((Path(folder) / "found.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("settings", nargs="*", help="engine.KEY=VALUE of engine=fsdp")
    parser.add_argument("--length", type=int, default=32_768, help="tokens of a sequence per GPU")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_intermixed_args()

    wanted = cases(args.gpus, parse_settings(args.settings).get("engine", {}))
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(write_model, (args.shape, folder, args.length * args.gpus), nprocs=1)
        for _ in range(args.rounds):
            for name, case in wanted.items():
                rounds[name].append(measure(case, args, folder))
                print(name, json.dumps(rounds[name][-1]), flush=True)

    found: dict[str, Any] = {}
    for name, each in rounds.items():
        found[name] = {key: statistics.median(one[key] for one in each) for key in each[0]}
    for one in found.values():
        one["of_one"] = one["tokens_per_s_per_gpu"] / found["one"]["tokens_per_s_per_gpu"]
        one["of_one_flops"] = one["flops"] / found["one"]["flops"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, no figures"
    print(f"RESULT {json.dumps({'device': device, 'torch': torch.__version__, **found})}")


if __name__ == "__main__":
    main()
