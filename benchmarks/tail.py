r"""What waiting for the last completions costs: a GRPO job that samples with the newest
weights, and jobs that sample while they train.

    python benchmarks/tail.py                     # one GPU, which the roles share
    python benchmarks/tail.py --gpus 2 --modes 0-both 1 2
    python benchmarks/tail.py --shape tiny --rollout hf --prompts 4 --samples 4 \
        --mean 24 --tokens 144 --steps 4          # anywhere

Each mode is a job in a process of its own, with the same seed and number of samples:

    0         max_staleness=0; on two GPUs one trains and one samples
    0-both    max_staleness=0; both GPUs sample, then both train
    1, 2      max_staleness; a completion that a sync cuts off goes on (partial rollout)
    1-drain   max_staleness=1; a sync waits for what is being sampled
    1-stale   max_staleness=1; the cache of what is being sampled stays

Weights are random and lengths geometric (endings.py). The reward is the share of
digits. Tokens per second are those of completions, over the time of whole steps. The
"tail" is the share of sampling in which a tenth of a step's completions or less were
left. It has a meaning where a step waits for all of them. No mode gives up device
memory between phases (``offload=false``): the 1.5b shape is planned to take 65 GiB of
one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from grpo_step import ENGINES, GPU, TASK, WARM_UP, composed_of, run_job, write_job
from shapes import SHAPES

MODES: dict[str, tuple[int, tuple[str, ...]]] = {
    "0": (0, ()),
    "0-both": (0, ("ray.placement=colocated", "engine.ranks=2", "rollout.replicas=2")),
    "1": (1, ()),
    "2": (2, ()),
    "1-drain": (1, ("sync.in_flight=drain",)),
    "1-stale": (1, ("sync.in_flight=stale_kv",)),
}
KEYS = ("time/step", "time/sample", "time/train", "time/sync")
LAST = 3  # steps whose reward is printed


def settings_of(mode: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """Return what the job of a mode has beside the options of grpo_step.py."""
    staleness, own = MODES[mode]
    settings = [
        f"max_staleness={staleness}",
        f"rollout.max_sequences={args.prompts * args.samples * (1 + staleness)}",
        "offload=false",
        "algorithm.behaviour=rollout",
        f"reward.target={TASK}:digits",
        f"engine.lr={args.lr}",
        "samples.every_steps=0",
        "trackers=[console,jsonl]",
        f"run_dir={folder / 'run'}",
    ]
    if GPU:
        settings += ["engine.max_tokens_per_gpu=6144", "rollout.kv_cache_gib=12"]
    if args.gpus == 2:
        settings += ["executor=ray", "ray.placement=disjoint"]
    return [*settings, *own]


def tail(rows: list[dict[str, float]], scored_at: Path) -> float:
    """Return the share of sampling in which a tenth of the completions were left."""
    times = [float(line) for line in scored_at.read_text().splitlines()]
    number, shares = int(rows[0]["batch/sequences"]), []
    for row in rows:
        ends = sorted(times[int(row["step"] - 1) * number :][:number])
        shares.append((ends[-1] - ends[number * 9 // 10 - 1]) / row["time/sample"])
    return statistics.mean(shares)


def job(args: argparse.Namespace) -> dict[str, Any]:
    """Run the job of one mode, and return what is printed of it."""
    args.steps += WARM_UP
    args.settings = settings_of(args.mode, args, args.folder) + args.settings
    scored_at = args.folder / "scored_at"
    os.environ["SCORED_AT"] = str(scored_at)
    args.folder.mkdir()
    with redirect_stdout(sys.stderr):
        rows = run_job(*composed_of(args, args.folder.parent), args.folder)

    tokens = [row["batch/completion_tokens"] * row["batch/sequences"] for row in rows]
    middle = {key: statistics.median(row.get(key, 0.0) for row in rows) for key in KEYS}
    return middle | {
        "rate": sum(tokens) / sum(row["time/step"] for row in rows),
        "tail": None if MODES[args.mode][0] else tail(rows, scored_at),
        "length": statistics.mean(row["batch/completion_tokens"] for row in rows),
        "reward": statistics.mean(row["reward/mean"] for row in rows[-LAST:]),
        "staleness": statistics.mean(row["staleness/mean"] for row in rows),
        "entropy": rows[-1].get("entropy", 0.0),
    }


def run(mode: str, folder: Path) -> dict[str, Any]:
    """Run the job of one mode in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], f"--mode={mode}", f"--folder={folder}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    return json.loads(done.stdout.splitlines()[-1])


def report(mode: str, found: dict[str, Any], args: argparse.Namespace) -> None:
    split = ", ".join(f"{key.removeprefix('time/')} {found[key]:.3f}" for key in KEYS)
    waiting = "" if found["tail"] is None else f", tail {found['tail']:.2f} of sampling"
    print(
        f"RESULT {args.gpus} GPU {args.shape} {mode}: {found['rate']:.0f} tokens/s; {split} s"
        f"{waiting}; {found['length']:.0f} tokens in the mean, reward {found['reward']:.4f} after "
        f"{(args.steps + WARM_UP) * args.prompts * args.samples} samples, staleness "
        f"{found['staleness']:.2f}, entropy {found['entropy']:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--rollout", choices=[*ENGINES, "hf"], default="vllm")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--mean", type=float, default=256, help="tokens of a completion")
    parser.add_argument("--tokens", type=int, default=1536, help="most of a completion")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=8, help=f"of each mode, after {WARM_UP}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--mode", choices=MODES, help="be one job; the script starts them")
    parser.add_argument("--folder", type=Path, help="of one job, beside the model")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of the jobs")
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(job(args)))
        return

    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        write_job(Path(name), args.shape, args.mean)
        for mode in args.modes:
            if mode == "0-both" and args.gpus == 1:
                print(f"mode {mode} is left out: it needs --gpus 2", flush=True)
                continue
            try:
                found = run(mode, Path(name) / mode)
            except subprocess.SubprocessError as error:
                print(f"mode {mode} failed: {error}", flush=True)
                continue
            # a checkpoint has the size of the model
            shutil.rmtree(Path(name) / mode)
            rates[mode] = found["rate"]
            report(mode, found, args)

    if waits := {mode: rate for mode, rate in rates.items() if not MODES[mode][0]}:
        best = max(waits, key=lambda mode: waits[mode])
        ratios = ", ".join(f"{mode} {rate / rates[best]:.2f}" for mode, rate in rates.items())
        print(f"RESULT tokens/s against mode {best}: {ratios}")


if __name__ == "__main__":
    main()
