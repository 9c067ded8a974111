r"""Share of the GPUs' matmul peak that a training step of engine=megatron reaches, and
what its export costs.

    python benchmarks/train_step_megatron.py 1.5b engine.gradient_checkpointing=none
    python benchmarks/train_step_megatron.py 7b --gpus 4 engine.tensor_parallel=2 \
        engine.gradient_checkpointing=none
    python benchmarks/train_step_megatron.py moe --gpus 4 --skewed \
        engine.expert_parallel=4
    python benchmarks/train_step_megatron.py moe --gpus 4 --engine fsdp \
        engine.gradient_checkpointing=false

Random weights; --tokens a data shard and step, in sequences of 2,048. A step is
forward, log-probs, backward, clipping and AdamW with fp32 weights. Model FLOPs: 6 x
parameters of a token's path x tokens, and causal attention. The peak is a bf16 product
of 8,192 x 8,192 x 8,192 on each GPU, measured just before. ``export`` is a pass over
``weights()``, next to an all-gather of as many bytes over the same GPUs. The last line
is ``RESULT`` and JSON; ``--profile`` prints before it where the first rank's time goes
in one more step and one more export.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sides import free_port
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from coupler.batch import Batch
from coupler.interfaces import Columns, Model, Output, Rank, StepInfo
from coupler.metrics import Metric, Metrics
from coupler.plugins.manager import Plugins
from coupler.testing.subject import configured, parse_settings

LENGTH = 2_048
_QWEN = {"max_position_embeddings": 32_768}
SHAPES: dict[str, PreTrainedConfig] = {
    "tiny": Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=True, **_QWEN,
    ),
    "1.5b": Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151_936, tie_word_embeddings=True, **_QWEN,
    ),
    "7b": Qwen2Config(
        hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152_064, tie_word_embeddings=False, **_QWEN,
    ),
    "tiny-moe": Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=512,
        norm_topk_prob=True, tie_word_embeddings=False, **_QWEN,
    ),
    "moe": Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151_936,
        norm_topk_prob=True, tie_word_embeddings=False, **_QWEN,
    ),
}  # fmt: skip


def write_model(_rank: int, shape: str, folder: str, skewed: bool) -> None:
    """Random weights, in a process whose memory is free again; skewed, one expert in
    eight gets most of the tokens.
    """
    config = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    if skewed:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    weight[:: len(weight) // 16 or 1] *= 8
    model.save_pretrained(folder)


def path_parameters(config: Any) -> int:
    """Parameters that one token meets, the head included and the embedding, which is a
    lookup, not.
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = (
        config.hidden_size
        * head
        * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    )
    if isinstance(config, Qwen3MoeConfig):
        mlp = 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts_per_tok
        mlp += config.hidden_size * config.num_experts
    else:
        mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp) + config.vocab_size * config.hidden_size


def step_flops(config: Any, tokens: int) -> float:
    """Forward and backward; attention looks at half of the square."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_attention_heads * head
    return 6.0 * path_parameters(config) * tokens + 6.0 * width * tokens * LENGTH


def surrogate(out: Columns, batch: Columns) -> tuple[torch.Tensor, Metrics]:
    ratio = (out["logprobs"] - out["logprobs"].detach()).exp()
    return -batch["advantages"] * ratio, {
        "ratio": Metric(ratio.detach().sum(), batch["loss_mask"].sum())
    }


def batch_of(vocabulary: int, seed: int, tokens: int, shards: int) -> Batch:
    random = np.random.default_rng(seed)
    mask = np.tile(np.arange(LENGTH) > 0, tokens // LENGTH)
    columns = {
        "tokens": random.integers(0, vocabulary, tokens).astype(np.int32),
        "loss_mask": mask,
        "loss_weight": (mask / mask.sum() / shards).astype(np.float32),
        "advantages": random.normal(size=tokens).astype(np.float32),
    }
    return Batch(np.full(tokens // LENGTH, LENGTH), columns)


def timed(work: Callable[[], object]) -> float:
    """Seconds; on several GPUs those of the slowest, since all wait for it."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def peak_flops() -> float:
    """FLOP/s of a large bf16 product, after a second in which power has become the
    limit.
    """
    if not torch.cuda.is_available():
        return float("inf")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [timed(lambda: [a @ b for _ in range(5)]) / 5 for _ in range(200)]
    return 2 * 8192**3 / statistics.median(times[100:])


def run(index: int, args: argparse.Namespace, folder: str, rendezvous: str) -> None:
    """One rank: measure, and print on the first."""
    backend = Plugins.load().get("engine", args.engine)
    settings = {
        "lr": 1e-6,
        "max_tokens_per_gpu": args.tokens,
        **parse_settings(args.settings).get("engine", {}),
    }
    engine = backend.load()(configured(backend.config, settings), Model(folder))
    layout = engine.setup(
        Rank(index=index, world=args.gpus, rendezvous=rendezvous if args.gpus > 1 else "")
    )
    config, shards = SHAPES[args.shape], layout.num_shards
    batches = [
        batch_of(config.vocab_size, layout.shard_of[index] + 97 * i, args.tokens, shards)
        for i in range(args.steps + 2)
    ]
    info = StepInfo(args.tokens * shards, 0)
    metrics: Metrics = {}

    def train(batch: Batch) -> None:
        metrics.update(engine.forward_backward(batch, (Output("logprobs"),), surrogate, info))
        assert engine.step().applied

    peak = peak_flops()
    warm = [timed(lambda b=b: train(b)) for b in batches[:2]]
    seconds = statistics.median(timed(lambda b=b: train(b)) for b in batches[2:])
    found = {
        "benchmark": "train_step_megatron",
        "engine": args.engine,
        "shape": args.shape + " skewed" * args.skewed,
        "gpus": args.gpus,
        "tokens": args.tokens,
        "settings": " ".join(args.settings),
        "step_s": round(seconds, 4),
        "first_step_s": round(warm[0], 2),
        "tokens_per_s": round(args.tokens * shards / seconds),
        "peak_tflops": round(peak / 1e12) if torch.cuda.is_available() else 0,
        "of_peak": round(step_flops(config, args.tokens * shards) / seconds / args.gpus / peak, 4),
        "most_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if torch.cuda.is_available()
        else 0.0,
        **{
            name: round(metric.value, 2)
            for name, metric in metrics.items()
            if name.startswith("moe/max")
        },
        **measure_export(engine),
    }
    if args.profile:
        print_profile("step", lambda: train(batches[-1]), index)
        print_profile("export", lambda: [None for _ in engine.weights()], index)
    if index == 0:
        print(f"RESULT {json.dumps(found)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def print_profile(what: str, call: Callable[[], object], index: int) -> None:
    """The operations that take most of the time, on the device and on the host."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    if index == 0:
        for where in ("cuda", "cpu")[not torch.cuda.is_available() :]:
            print(f"{what}, by time of {where}")
            print(
                profiler.key_averages().table(
                    sort_by=f"self_{where}_time_total", row_limit=20, max_name_column_width=60
                )
            )


def measure_export(engine: Any) -> dict[str, float]:
    """Seconds of a pass over ``weights()`` and of an all-gather of as many bytes, and
    the bytes.
    """
    size = 0

    def export() -> None:
        nonlocal size
        size = sum(tensor.nbytes for _, tensor in engine.weights())

    timed(export)
    seconds = statistics.median(timed(export) for _ in range(3))
    world, device = dist.get_world_size(), engine.device
    part = torch.ones(size // world // 2, dtype=torch.bfloat16, device=device)
    whole = torch.empty(len(part) * world, dtype=torch.bfloat16, device=device)
    timed(lambda: dist.all_gather_into_tensor(whole, part))
    gathered = statistics.median(
        timed(lambda: dist.all_gather_into_tensor(whole, part)) for _ in range(3)
    )
    times = {"export_s": round(seconds, 4), "all_gather_s": round(gathered, 4)}
    return {
        "export_gb": round(size / 1e9, 3),
        **times,
        "export_over_all_gather": round(seconds / gathered, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("settings", nargs="*", help="engine.KEY=VALUE")
    parser.add_argument("--engine", default="megatron")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch and step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--skewed", action="store_true", help="most tokens to few experts")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(write_model, (args.shape, folder, args.skewed), nprocs=1)
        mp.spawn(run, (args, folder, f"127.0.0.1:{free_port()}"), nprocs=args.gpus)


if __name__ == "__main__":
    main()
