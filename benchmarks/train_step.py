"""Share of the GPU's matmul peak that a training step of engine=fsdp reaches, next to
plain transformers.

    python benchmarks/train_step.py engine.compile=true
    engine.gradient_checkpointing=false --profile step.txt python
    benchmarks/train_step.py --plain

One GPU; a Qwen2.5 shape of 1.5 B parameters with random weights; 16,384 tokens a step,
for the engine in sequences of lognormal lengths, 2,048 in the mean. A step is forward,
log-probs, backward, clipping and AdamW with fp32 weights (for plain transformers: AdamW
in bf16, 8 x 2,048 tokens). Model FLOPs: 6 x parameters x tokens, and causal attention.
The peak is a bf16 product of 8,192 x 8,192 x 8,192, measured before each run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen2Config

from coupler.batch import Batch
from coupler.interfaces import Columns, Model, Output, Rank, StepInfo
from coupler.metrics import Metric, Metrics
from coupler.testing.subject import configured, parse_settings
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine

TOKENS = 16_384
SHAPE = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}


def peak_flops() -> tuple[float, float]:
    """FLOP/s of a large product on random data: at first, and after a second, when
    power has become the limit.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    _timed(lambda: [a @ b for _ in range(5)])
    time.sleep(0.5)
    times = [_timed(lambda: [a @ b for _ in range(5)]) / 5 for _ in range(200)]
    return 2 * 8192**3 / statistics.median(times[:10]), 2 * 8192**3 / statistics.median(times[100:])


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    a = torch.randn(2**30, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / statistics.median(_timed(lambda: b.copy_(a)) for _ in range(10))


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def model_flops(parameters: int, lengths: np.ndarray) -> float:
    """Of forward and backward; the head is among the parameters, and attention looks at
    half of the square.
    """
    heads = SHAPE["num_hidden_layers"] * SHAPE["hidden_size"]
    return 6 * parameters * float(lengths.sum()) + 6 * heads * float(
        (lengths.astype(float) ** 2).sum()
    )


def ragged(random: np.random.Generator, num_micro_batches: int) -> np.ndarray:
    """Lengths of sequences, lognormal with a mean of 2,048, a little below ``TOKENS`` a
    micro-batch.
    """
    lengths: list[int] = []
    for _ in range(num_micro_batches):
        left = TOKENS - int(random.integers(0, 256))
        while left > 0:
            lengths.append(
                min(left, int(np.clip(random.lognormal(np.log(2048) - 0.32, 0.8), 64, 8192)))
            )
            left -= lengths[-1]
    return np.array(lengths)


def batch_of(random: np.random.Generator, lengths: np.ndarray) -> Batch:
    """Random tokens, all but the first of each sequence trained, weights and advantages
    as GRPO would give.
    """
    total = int(lengths.sum())
    mask = np.ones(total, bool)
    mask[np.cumsum(lengths) - lengths] = False
    return Batch(
        lengths,
        {
            "tokens": random.integers(0, SHAPE["vocab_size"], total).astype(np.int32),
            "loss_mask": mask,
            "loss_weight": (mask / mask.sum()).astype(np.float32),
            "advantages": random.normal(size=total).astype(np.float32),
        },
    )


def surrogate(out: Columns, batch: Columns) -> tuple[torch.Tensor, Metrics]:
    """The policy gradient of one step on fresh samples."""
    ratio = (out["logprobs"] - out["logprobs"].detach()).exp()
    return -batch["advantages"] * ratio, {
        "ratio": Metric(ratio.detach().sum(), batch["loss_mask"].sum())
    }


def updated_bytes(engine: FSDPEngine) -> int:
    """Return the bytes that an update has to read and write: master weights and two
    moments both ways, the gradient, and the copy that layers compute with.
    """
    optimizer = engine._optimizer
    assert optimizer is not None
    total = 0
    for shard in optimizer.elementwise.values():
        grad, copy = engine.masters.gradient_of(shard), engine.masters.copy_of(shard)
        assert grad is not None
        written = 0 if copy is shard else copy.itemsize
        total += shard.numel() * (3 * 2 * shard.itemsize + grad.itemsize + written)
    return total


def run_engine(
    folder: Path,
    settings: Mapping[str, object],
    steps: int,
    num_micro_batches: int,
    out: Path | None,
) -> None:
    """Time whole steps, each on other lengths, and print the share of the peak."""
    peak = peak_flops()
    engine = FSDPEngine(configured(FSDPConfig, settings), Model(str(folder)))
    engine.setup(Rank())
    parameters = sum(tensor.numel() for tensor in engine.named.values())
    random = np.random.default_rng(0)
    batches = [batch_of(random, ragged(random, num_micro_batches)) for _ in range(steps)]
    want = (Output("logprobs"),)

    def train(*chosen: Batch) -> None:
        for batch in chosen:
            engine.forward_backward(batch, want, surrogate, StepInfo(batch.num_tokens, 0))
            assert engine.step().applied

    first = _timed(lambda: train(batches[0]))
    _timed(lambda: train(*batches[1:3]))
    torch.cuda.reset_peak_memory_stats()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seconds = _timed(lambda: train(*batches[3:]))
    again = torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled
    flops = sum(model_flops(parameters, batch.lengths) for batch in batches[3:])
    note = f"first step {first:.0f} s, {again} graphs compiled later"
    _report("engine=fsdp", settings, peak, flops, seconds, steps - 3, note)
    times, size = [], 0
    for batch in batches[:5]:
        engine.forward_backward(batch, want, surrogate, StepInfo(batch.num_tokens, 0))
        size = updated_bytes(engine)
        times.append(_timed(engine.step))
    taken, bound = statistics.median(times), size / copy_bandwidth()
    print(
        f"RESULT optimizer step: {1e3 * taken:.1f} ms, {taken / bound:.2f} times its "
        f"{size / 1e9:.1f} GB at the rate of a copy",
        flush=True,
    )
    if out is not None:
        _profile(lambda: train(batches[0], batches[1]), out)


def run_plain(folder: Path, mode: str, steps: int) -> None:
    """Time transformers' own model with SDPA and AdamW in bf16: ``eager``, ``compiled``
    or ``recomputed`` layers.
    """
    torch._dynamo.reset()
    peak = peak_flops()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
    )
    model.cuda().train()
    if mode == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mode != "eager":
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    lengths = np.full(8, TOKENS // 8)
    ids = torch.randint(0, SHAPE["vocab_size"], (8, TOKENS // 8), device="cuda")

    def train(count: int) -> None:
        for _ in range(count):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()

    _timed(lambda: train(3))
    torch.cuda.reset_peak_memory_stats()
    seconds = _timed(lambda: train(steps - 3))
    flops = (steps - 3) * model_flops(sum(p.numel() for p in model.parameters()), lengths)
    _report("transformers", {"mode": mode}, peak, flops, seconds, steps - 3, "")


def _report(
    name: str,
    settings: Mapping,
    peak: tuple[float, float],
    flops: float,
    seconds: float,
    steps: int,
    note: str,
) -> None:
    said = " ".join(f"{key}={value}" for key, value in settings.items())
    memory = torch.cuda.max_memory_allocated() / 2**30
    burst, sustained = peak
    print(
        f"RESULT {name} {said}: {flops / seconds / 1e12:.0f} TFLOP/s, "
        f"{flops / seconds / burst:.3f} of the peak "
        f"{burst / 1e12:.0f} (of what a second of products sustains, {sustained / 1e12:.0f}: "
        f"{flops / seconds / sustained:.3f}), {seconds / steps * 1e3:.1f} ms a step, "
        f"{memory:.0f} GiB; {note}",
        flush=True,
    )


def _profile(work: Callable[[], object], out: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
    out.write_text(
        found.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=70, max_name_column_width=90
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="engine.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="also measure plain transformers")
    parser.add_argument(
        "--profile", type=Path, help="write a table of the kernels of one step here"
    )
    parser.add_argument(
        "--layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer for a try"
    )
    args = parser.parse_args()
    SHAPE["num_hidden_layers"] = args.layers
    print(
        (
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy "
            f"{copy_bandwidth() / 1e12:.2f} TB/s"
        ),
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(
                Qwen2Config(**SHAPE), dtype=torch.bfloat16, trust_remote_code=False
            )
        model.cpu().save_pretrained(folder)
        del model
        settings = parse_settings(args.settings).get("engine", {})
        run_engine(Path(folder), settings, args.steps, args.micro_batches, args.profile)
        gc.collect()  # hooks of parameters refer to themselves
        torch.cuda.empty_cache()
        for mode in ("eager", "compiled", "recomputed") if args.plain else ():
            run_plain(Path(folder), mode, args.steps)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
