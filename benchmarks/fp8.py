"""Loss, log-probs and time of training with engine.precision=fp8, beside bf16.

    python benchmarks/fp8.py                              # a GPU, or --shape tiny
    python benchmarks/fp8.py --recipes tensorwise rowwise
    python benchmarks/fp8.py --weights smollm2 --steps 100
    python benchmarks/fp8.py engine.compile=false --layers 4

Each run starts from the same weights and reads the same batches, one micro-batch a
step. The loss is the mean of -log p over all tokens but the first of each sequence.
Without --weights, weights are random and texts are walks on a fixed graph of tokens.
With it, they are those of SmolLM2-135M-Instruct (recipes/smollm2.py) and tasks of
reasoning_gym with their answers. The time is the median of the later half of the
steps. On the CPU fp8 is emulated, so that its time says nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from coupler.batch import Batch
from coupler.interfaces import Columns, Model, Output, Rank, StepInfo
from coupler.metrics import Metrics
from coupler.testing.subject import configured, parse_settings
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

GPU = torch.cuda.is_available()
WANT = (Output("logprobs"),)
WALKED, WAYS, LENGTH = 512, 4, 1024
"""Tokens of the graph, the next ones of each, and the longest walk."""
TASKS = ("chain_sum", "simple_equations", "leg_counting", "family_relationships", "countdown")


@dataclass
class Run:
    """What one run measured: losses by step, log-probs before the first, seconds of
    each step, and GiB.
    """

    losses: list[float]
    logprobs: np.ndarray
    seconds: list[float]
    gib: float

    @property
    def ms(self) -> float:
        return 1e3 * statistics.median(self.seconds[len(self.seconds) // 2 :])


def walks(tokens: int) -> Iterator[list[int]]:
    """Yield walks on a graph. Their loss is log(WAYS) at best."""
    random = np.random.default_rng(0)
    ways = random.integers(0, WALKED, (WALKED, WAYS))
    while True:
        length = int(random.integers(16, min(LENGTH, tokens) + 1))
        walk = [int(random.integers(0, WALKED))]
        for way in random.integers(0, WAYS, length - 1):
            walk.append(int(ways[walk[-1], way]))
        yield walk


def solved(folder: Path) -> Iterator[list[int]]:
    """Yield tasks and their answers as tokens, those of all kinds in turn."""
    import reasoning_gym

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    kinds = [reasoning_gym.create_dataset(task, size=1_000_000, seed=0) for task in TASKS]
    for index in range(1_000_000):
        for kind in kinds:
            item = kind[index]
            text = f"Question: {item['question']}\nAnswer: {item['answer']}"
            yield tokenizer(text)["input_ids"]


def batches(rows: Iterator[list[int]], tokens: int, count: int) -> list[Batch]:
    """Return batches of whole sequences, of at most so many tokens each."""
    found: list[Batch] = []
    held: list[list[int]] = []
    while len(found) < count:
        row = next(rows)[:tokens]
        if held and sum(map(len, held)) + len(row) > tokens:
            found.append(batch_of(held))
            held = []
        if len(row) > 1:
            held.append(row)
    return found


def batch_of(rows: Sequence[list[int]]) -> Batch:
    lengths = np.array([len(row) for row in rows])
    mask = np.ones(int(lengths.sum()), bool)
    mask[np.cumsum(lengths) - lengths] = False
    columns = {
        "tokens": np.concatenate(rows).astype(np.int32),
        "loss_mask": mask,
        "loss_weight": (mask / mask.sum()).astype(np.float32),
    }
    return Batch(lengths, columns)


def surprise(out: Columns, _: Columns) -> tuple[torch.Tensor, Metrics]:
    return -out["logprobs"], {}


def train(folder: Path, settings: Mapping[str, Any], data: Sequence[Batch]) -> Run:
    """Train from the folder's weights, one step a batch."""
    torch._dynamo.reset()
    engine = FSDPEngine(configured(FSDPConfig, settings), Model(str(folder)))
    engine.setup(Rank())
    mask = data[0]["loss_mask"]
    run = Run([], engine.forward(data[0], WANT)["logprobs"][mask], [], 0.0)
    if GPU:
        torch.cuda.reset_peak_memory_stats()

    kept: list[torch.Tensor] = []

    def loss(out: Columns, batch: Columns) -> tuple[torch.Tensor, Metrics]:
        kept.append(-(out["logprobs"].detach() * batch["loss_weight"]).sum())
        return surprise(out, batch)

    for index, batch in enumerate(data):
        start = time.perf_counter()
        engine.forward_backward(batch, WANT, loss, StepInfo(batch.num_tokens, index))
        assert engine.step().applied
        if GPU:
            torch.cuda.synchronize()
        run.seconds.append(time.perf_counter() - start)

    run.losses = [float(each) for each in kept]
    run.gib = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0
    engine.close()
    return run


def random_weights(folder: Path, shape: str, layers: int) -> Path:
    torch.manual_seed(0)
    config: dict[str, Any] = {**SHAPES[shape], "max_position_embeddings": 8192}
    if layers:
        config["num_hidden_layers"] = layers
    with torch.device("cuda" if GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**config), dtype=torch.bfloat16, trust_remote_code=False
        )
    model.cpu().save_pretrained(folder)
    return folder


def report(name: str, run: Run, bf16: Run) -> None:
    """Print what a run measured, beside the run in bf16."""
    steps = [0, *range(9, len(run.losses), 10)]
    curve = ", ".join(f"{step + 1}: {run.losses[step]:.4f}" for step in steps)
    print(f"RESULT loss {name} by step {curve}")

    off = np.abs(np.subtract(run.losses, bf16.losses))
    moved = np.abs(run.logprobs - bf16.logprobs)
    print(
        f"RESULT {name}: {run.ms:.1f} ms a step, {bf16.ms / run.ms:.2f} times as fast as bf16, "
        f"{run.gib:.1f} GiB; first step {run.seconds[0]:.0f} s; losses {off.mean():.4f} apart "
        f"in the mean and {off.max():.4f} at most; log-probs of the first weights "
        f"{moved.mean():.4f} nats apart in the mean and {moved.max():.3f} at most",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="engine.KEY=VALUE, for all runs")
    parser.add_argument("--shape", choices=SHAPES, default="1.5b" if GPU else "tiny")
    parser.add_argument("--weights", choices=["smollm2"], help="trained ones, and real text")
    parser.add_argument("--layers", type=int, default=0, help="of --shape, fewer for a try")
    parser.add_argument("--recipes", nargs="+", default=["rowwise_with_gw_hp"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=16_384 if GPU else 512, help="of a step")
    args = parser.parse_args()

    name = torch.cuda.get_device_name() if GPU else "CPU"
    model = args.weights or args.shape
    print(f"{name}, torch {torch.__version__}, {model}, {args.tokens} tokens a step", flush=True)
    settings = {
        "dtype": "bf16",
        "compile": GPU,
        "gradient_checkpointing": False,
        "lr": 1e-5 if args.weights else 3e-4,
        "max_tokens_per_gpu": args.tokens,
        **parse_settings(args.settings).get("engine", {}),
    }

    with tempfile.TemporaryDirectory() as place:
        if args.weights:
            folder = Path(import_module("smollm2").folder())
            data = batches(solved(folder), args.tokens, args.steps)
        else:
            folder = random_weights(Path(place), args.shape, args.layers)
            data = batches(walks(args.tokens), args.tokens, args.steps)

        bf16 = train(folder, settings, data)
        report("bf16", bf16, bf16)
        for recipe in args.recipes:
            # Hooks of parameters refer to themselves.
            gc.collect()
            torch.cuda.empty_cache()
            products = {"precision": "fp8", "fp8_recipe": recipe}
            report(f"fp8 {recipe}", train(folder, {**settings, **products}, data), bf16)


if __name__ == "__main__":
    main()
