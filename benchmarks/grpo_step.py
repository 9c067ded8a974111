"""Where the time of a GRPO step goes: engine=fsdp and a rollout on one GPU, against its
parts done bare.

    python benchmarks/grpo_step.py                # 256 samples a step
    python benchmarks/grpo_step.py --rollout sglang
    python benchmarks/grpo_step.py offload=true   # engine and rollout take turns
    python benchmarks/grpo_step.py --shape tiny --prompts 2 --samples 2 --tokens 8
    # anywhere

"Bare" is the sum of the inference engine's own ``generate`` of as many requests with
the same arguments, forward, backward and AdamW step of the engine alone on as many
tokens, and one copy of the weights on the device. Every prompt has 96 tokens and every
completion is as long as allowed, but for a random stop in some hundred of them. Weights
are random. All sides start together, and the bare parts are measured after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import turns
from endings import end_by_chance
from shapes import SHAPES
from sides import Side, serve, spread

from coupler.interfaces import Model, Rank, Request

WARM_UP = 3  # steps, and calls of the bare parts
PROMPT = 96
ALPHABET = "0123456789+-*= abcdefghijklmnopq"
GPU = torch.cuda.is_available()
CACHE_GIB = 8.0
TASK = Path(__file__).with_name("grpo_task.py")
PHASES = ("time/sample", "time/complete", "time/train", "time/sync")


def write_job(folder: Path, shape: str, mean: float = 0.0) -> None:
    """Write a model with random weights, a tokenizer of single characters, and
    prompts.

    Args:
        mean: tokens of a completion on average. 0 leaves the end to the weights.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    vocabulary = {"<pad>": 0, "<eos>": 1} | {
        character: i + 2 for i, character in enumerate(ALPHABET)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder / "model")
    sizes = dict(SHAPES[shape])
    if mean:
        sizes["tie_word_embeddings"] = False
    config = Qwen2Config(
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **sizes,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if mean else torch.bfloat16
    with torch.device("cuda" if GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if mean:
        end_by_chance(model, mean, 1, range(2, len(vocabulary)))
    model.save_pretrained(folder / "model")
    del model
    if GPU:
        torch.cuda.empty_cache()
    rng = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(2048):
            row = {"prompt": "".join(rng.choice(ALPHABET) for _ in range(PROMPT)), "answer": ""}
            file.write(json.dumps(row) + "\n")


def options(args: argparse.Namespace, folder: Path) -> list[str]:
    given = {
        "engine": "fsdp", "engine.gradient_checkpointing": "false",
        "engine.max_tokens_per_gpu": 65536,
        "rollout": args.rollout, "algorithm": "grpo", "algorithm.kl": "none",
        "model.path": folder / "model", "data.source": folder / "prompts.jsonl",
        "data.max_prompt_tokens": PROMPT,
        "reward.target": f"{TASK}:score", "sampling.max_tokens": args.tokens,
        "run_dir": folder / "run",
        "trackers": "[jsonl]", "checkpoint.export": "false", "checkpoint.contents": "[model,extra]",
        "steps": args.steps,
        "prompts_per_step": args.prompts, "samples_per_prompt": args.samples,
    }  # fmt: skip
    if args.rollout != "hf":
        given["rollout.max_model_len"] = PROMPT + args.tokens
    if GPU:
        given["rollout.kv_cache_gib"] = CACHE_GIB
    return [f"{key}={value}" for key, value in given.items()] + args.settings


def run_job(composed: Any, plugins: Any, folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl after the warm-up."""
    from coupler import jobs

    jobs.train(composed, plugins)
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in rows if row["step"] > WARM_UP] or rows[-1:]


def bare_generate(composed: Any, args: argparse.Namespace) -> None:
    generate = ENGINES[args.rollout](composed)
    rng = np.random.default_rng(0)

    def timed() -> dict[str, float]:
        prompts = [
            tuple(map(int, rng.integers(2, len(ALPHABET), PROMPT))) for _ in range(args.prompts)
        ]
        requests = [
            Request(p, args.tokens, seed=int(rng.integers(2**31)))
            for p in prompts
            for _ in range(args.samples)
        ]
        return {"seconds": generate(requests)}

    serve(timed)


def vllm(composed: Any) -> Callable[[list[Request]], float]:
    """Start vLLM, and return a function that takes the time of requests."""
    from coupler_rollout_vllm.compat.version import prepare_process

    prepare_process()  # before the first import of vLLM
    from vllm import LLM
    from vllm.inputs import tokens_input

    from coupler_rollout_vllm.arguments import engine_arguments
    from coupler_rollout_vllm.compat.engine import sampling_params

    config = composed.config
    arguments = engine_arguments(config.rollout, Model(config.model.path), Rank(seed=1))
    del arguments["scheduler_cls"]  # vLLM's own
    llm = LLM(**arguments)

    def generate(requests: list[Request]) -> float:
        inputs: list[Any] = [tokens_input(list(r.prompt)) for r in requests]
        params = [
            sampling_params(r, 0, r.max_tokens, config.rollout.per_request_seeds) for r in requests
        ]
        for each in params:
            each.flat_logprobs = True  # the quickest that it returns
        start = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - start

    return generate


def sglang(composed: Any) -> Callable[[list[Request]], float]:
    """Start SGLang with its own sampler, and return a function that takes the time of
    requests.
    """
    from rollout_sglang_throughput import own_engine

    config = composed.config
    engine = own_engine(Path(config.model.path), config.rollout)

    def generate(requests: list[Request]) -> float:
        inputs = [list(request.prompt) for request in requests]
        params = [
            {"max_new_tokens": r.max_tokens, "temperature": r.temperature, "ignore_eos": True}
            for r in requests
        ]
        start = time.perf_counter()
        engine.generate(input_ids=inputs, sampling_params=params, return_logprob=True)
        return time.perf_counter() - start

    return generate


ENGINES = {"vllm": vllm, "sglang": sglang}


def bare_train(composed: Any, args: argparse.Namespace) -> None:
    """Forward, backward and AdamW on sequences of full length, and a copy of the
    weights that a rollout gets.
    """
    from coupler.batch import Batch
    from coupler.interfaces import Columns, Output, StepInfo
    from coupler.metrics import Metrics
    from coupler_engine_fsdp.engine import FSDPEngine

    engine = FSDPEngine(composed.config.engine, Model(composed.config.model.path))
    engine.setup(Rank())
    copies = [(tensor.clone(), torch.empty_like(tensor)) for _, tensor in engine.weights()]
    number, length = args.prompts * args.samples, PROMPT + args.tokens
    rng = np.random.default_rng(0)

    def surrogate(out: Columns, batch: Columns) -> tuple[torch.Tensor, Metrics]:
        return -batch["advantages"] * (out["logprobs"] - out["logprobs"].detach()).exp(), {}

    def train() -> dict[str, float]:
        mask = np.tile(np.arange(length) >= PROMPT, number)
        tokens = rng.integers(2, len(ALPHABET), (args.prompts, 1, length)).repeat(args.samples, 1)
        tokens[:, :, PROMPT:] = rng.integers(
            2, len(ALPHABET), (args.prompts, args.samples, args.tokens)
        )
        columns = {
            "tokens": tokens.reshape(-1).astype(np.int32),
            "loss_mask": mask,
            "loss_weight": (mask / mask.sum()).astype(np.float32),
            "advantages": rng.normal(size=len(mask)).astype(np.float32),
        }
        group = {"group": np.arange(args.prompts).repeat(args.samples)}
        batch = Batch(np.full(number, length), columns, group)
        info = StepInfo(batch.num_tokens, 0)
        start = synchronized()
        engine.forward_backward(batch, (Output("logprobs"),), surrogate, info)
        assert engine.step().applied
        trained = synchronized()
        for source, target in copies:
            target.copy_(source)
        return {"seconds": trained - start, "copy": synchronized() - trained}

    serve(train)


def synchronized() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


BARE = {"generate": bare_generate, "train": bare_train}


def report(
    rows: list[dict[str, float]], bare: dict[str, list[dict[str, float]]], args: argparse.Namespace
) -> None:
    step, phases = middle(rows, "time/step"), {name: middle(rows, name) for name in PHASES}
    parts = {name: middle(found, "seconds") for name, found in bare.items()}
    parts["copy"] = middle(bare["train"], "copy")
    split = ", ".join(
        f"{name.removeprefix('time/')} {1e3 * seconds:.1f}" for name, seconds in phases.items()
    )
    print(
        f"RESULT step {1e3 * step:.1f} ms: {split}, rest {1e3 * (step - sum(phases.values())):.1f}"
    )
    print(
        f"RESULT bare {1e3 * sum(parts.values()):.1f} ms: "
        + ", ".join(f"{n} {1e3 * s:.1f}" for n, s in parts.items())
    )
    print(
        f"RESULT grpo step {args.rollout} {args.shape}, {args.prompts} x {args.samples} samples of "
        f"{args.tokens} tokens "
        f"({middle(rows, 'batch/completion_tokens'):.1f} in the mean) {' '.join(args.settings)}: "
        f"{step / sum(parts.values()):.3f} of the bare parts; median of {len(rows)} steps"
    )
    sampled = [each["time/sample"] for each in rows]
    raw = [each["seconds"] for each in bare["generate"]]
    ratios = [ours / theirs for ours, theirs in zip(sampled, raw, strict=True)]
    print(
        f"RESULT sampling {spread(sampled)} s, bare {spread(raw)} s; by turns {spread(ratios)} "
        "times as long"
    )


def middle(rows: list[dict[str, float]], column: str) -> float:
    return statistics.median(row.get(column, 0.0) for row in rows)


def compare(args: argparse.Namespace) -> None:
    os.environ["COUPLER_PLUGINS"] = "turns"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_job(folder, args.shape)
        again = [arg for arg in sys.argv[1:] if not arg.startswith("--side")]
        sides = {
            side: Side(__file__, f"--side={side}", f"--folder={folder}", *again) for side in BARE
        }
        for side in sides.values():
            # before the job: engines that start at once would take each other's memory
            # for their own
            side.ready()

        bare: dict[str, list[dict[str, float]]] = {side: [] for side in BARE}
        turns.after += [partial(measure, sides[side], bare[side]) for side in BARE]
        rows = run_job(*composed_of(args, folder, "trackers=[jsonl,turns]"), folder)
        for side in sides.values():
            side.close()
        report(rows, {side: found[-len(rows) :] for side, found in bare.items()}, args)


def measure(side: Side, found: list[dict[str, float]], _metrics: Mapping[str, float]) -> None:
    found.append(side.measure())


def composed_of(args: argparse.Namespace, folder: Path, *more: str) -> tuple[Any, Any]:
    from coupler.config.compose import compose
    from coupler.plugins.manager import Plugins

    plugins = Plugins.load()
    return compose(plugins, [*options(args, folder), *more]), plugins


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--rollout", choices=ENGINES, default="vllm")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each completion")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--side", choices=BARE, help="be one bare side; the script starts both")
    parser.add_argument("--folder", type=Path, help="of a side: where the model is")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of the job")
    args = parser.parse_args()
    if args.side:
        composed, _ = composed_of(args, args.folder)
        BARE[args.side](composed, args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
