"""The whole GRPO job, ours (engine=fsdp, rollout=hf) against TRL 1.16: steps per second
and reward on 2 CPU cores.

Both sides get the same model folder, prompts, reward function, group size, completion
limit, batch and learning rate, and run one after the other, each in a process of its
own. TRL lives in an environment of its own, made once:

    uv venv --python 3.11 .envs/trl
    uv pip install --python .envs/trl trl==1.16.0 torch==2.13.0 transformers==5.17.0
    .venv/bin/python benchmarks/grpo_vs_trl.py

Steps per second are of the median step without the first two, which warm up: everything
from one optimizer step to the next, weight sync included. With --rounds every seed runs
so often on both sides, by turns, and the lowest time of each step counts: its work is
the same in every round, what others do on the machine is not.

128 tokens are allowed; the untrained model uses about 30 of them and learns to use 5,
but a few samples of every batch run long: TRL decodes and trains everything at the
longest one's length, we do not. Where little is ragged, both are bound by the same
matrix products: with 40 of 48 tokens used the ratio was 1.4. On a machine that others
use too, set --threads 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from grpo_task import CHARACTERS, EOS, PAD, write_prompts

HERE = Path(__file__).parent
WARM_UP = 2


def write_model(folder: Path) -> None:
    """Write an untrained Qwen2 of 0.8 M parameters and its tokenizer of single
    characters.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {
        character: i + 2 for i, character in enumerate(CHARACTERS)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)


def run_ours(settings: dict[str, Any]) -> None:
    """One job in this process; prints one JSON line."""
    import torch

    from coupler import jobs
    from coupler.config.compose import compose
    from coupler.plugins.manager import Plugins

    torch.set_num_threads(settings["threads"])
    folder = Path(settings["folder"])
    run_dir = folder / f"ours-{settings['seed']}-{time.time_ns()}"
    plugins = Plugins.load()
    options = {
        "engine": "fsdp", "engine.lr": settings["lr"], "engine.gradient_checkpointing": "false",
        "engine.max_tokens_per_gpu": 65536, "rollout": "hf", "algorithm": "grpo",
        "algorithm.kl": "none",
        "algorithm.log_entropy": "false", "model.path": folder / "model",
        "data.source": folder / "prompts.jsonl",
        "reward.target": f"{HERE / 'grpo_task.py'}:score",
        "sampling.max_tokens": settings["max_tokens"],
        "run_dir": run_dir, "trackers": "[jsonl]", "checkpoint.export": "false",
        "checkpoint.contents": "[model,extra]",
        **{key: settings[key] for key in ("steps", "prompts_per_step", "samples_per_prompt",
                                          "seed")},
    }  # fmt: skip
    given = [f"{key}={value}" for key, value in options.items()] + settings.get("settings", [])
    jobs.train(compose(plugins, given), plugins)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    columns = {
        "seconds": "time/step",
        "rewards": "reward/mean",
        "lengths": "batch/completion_tokens",
    }
    print(
        "\n" + json.dumps({name: [row[column] for row in rows] for name, column in columns.items()})
    )


def run(interpreter: Path, script: str, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Run one side to its end and return what it printed last."""
    command = [str(interpreter), str(HERE / script), json.dumps(settings)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(settings["threads"]),
        "PYTHONPATH": str(HERE),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl", type=Path, default=HERE.parent / ".envs/trl/bin/python")
    arguments = parser.parse_args()
    sides = {
        "coupler": (Path(sys.executable), "grpo_vs_trl.py"),
        "trl 1.16": (arguments.trl, "grpo_vs_trl_trl.py"),
    }
    results: dict[str, list[dict[str, list[float]]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        write_prompts(Path(folder) / "prompts.jsonl")
        settings = {
            key: value
            for key, value in vars(arguments).items()
            if key not in ("seeds", "rounds", "trl")
        } | {"folder": folder}
        for seed in range(arguments.seeds):
            rounds: dict[str, list[dict[str, list[float]]]] = {side: [] for side in sides}
            for _ in range(arguments.rounds):
                for side, (interpreter, script) in sides.items():
                    rounds[side].append(run(interpreter, script, settings | {"seed": seed}))
            for side, runs in rounds.items():
                lowest = [
                    min(times) for times in zip(*(each["seconds"] for each in runs), strict=True)
                ]
                results[side].append(runs[0] | {"seconds": lowest})
                print(
                    f"seed {seed}  {side:10}{statistics.median(lowest[WARM_UP:]):9.3f} s/step",
                    flush=True,
                )
    report(results)


def report(results: dict[str, list[dict[str, list[float]]]]) -> None:
    print(
        f"{'':10}{'steps/s':>9}{'s/step':>9}{'tokens':>8}"
        f"{'reward first':>14}{'reward last':>13}   last by seed"
    )
    rates = {}
    for side, runs in results.items():
        seconds = statistics.median(s for r in runs for s in r["seconds"][WARM_UP:])
        first, last = ([r["rewards"][i] for r in runs] for i in (0, -1))
        length = statistics.mean(length for r in runs for length in r["lengths"])
        rates[side] = 1 / seconds
        each = " ".join(f"{reward:.3f}" for reward in last)
        print(
            f"{side:10}{1 / seconds:9.2f}{seconds:9.3f}{length:8.1f}{statistics.mean(first):14.3f}"
            f"{statistics.mean(last):13.3f}   {each}"
        )
    print(f"ratio {rates['coupler'] / rates['trl 1.16']:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        run_ours(json.loads(sys.argv[1]))
    else:
        main()
