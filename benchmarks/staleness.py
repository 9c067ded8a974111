"""The reward after as many samples, by how old the weights may be that sampled them.

    python benchmarks/staleness.py
    python benchmarks/staleness.py --modes 0 1 --lr 1e-3 --steps 20

The job is that of grpo_vs_trl.py, an untrained model of 0.8 M parameters, in each mode
of tail.py with the same seeds. Every other mode is compared with the first by seed: the
mean difference of the last rewards, and its standard error. It says nothing of speed,
which tail.py measures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from grpo_task import write_prompts
from grpo_vs_trl import run, write_model
from tail import LAST, MODES

TRIED = [mode for mode in MODES if mode != "0-both"]


def rewards_of(mode: str, folder: Path, arguments: argparse.Namespace) -> list[list[float]]:
    """Return the rewards of each step, by seed."""
    staleness, own = MODES[mode]
    settings = [f"max_staleness={staleness}", "algorithm.behaviour=rollout", *own]
    found = []
    for seed in range(arguments.seeds):
        job = {
            "folder": str(folder), "seed": seed, "steps": arguments.steps, "lr": arguments.lr,
            "max_tokens": 128, "prompts_per_step": 16, "samples_per_prompt": 8, "threads": 1,
            "settings": settings + arguments.settings,
        }  # fmt: skip
        found.append(run(Path(sys.executable), "grpo_vs_trl.py", job)["rewards"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=TRIED, default=TRIED)
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of all jobs")
    arguments = parser.parse_args()

    first: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        write_prompts(folder / "prompts.jsonl")
        for mode in arguments.modes:
            found = rewards_of(mode, folder, arguments)
            last = [statistics.mean(rewards[-LAST:]) for rewards in found]
            middle = statistics.mean(rewards[arguments.steps // 2] for rewards in found)
            text = f"reward {middle:.3f} half way, {statistics.mean(last):.3f} at the end"
            if first:
                apart = [mine - its for mine, its in zip(last, first, strict=True)]
                error = statistics.stdev(apart) / len(apart) ** 0.5
                text += f", {statistics.mean(apart):+.3f} (standard error {error:.3f})"
            first = first or last
            print(f"RESULT {mode}: {text}", flush=True)


if __name__ == "__main__":
    main()
