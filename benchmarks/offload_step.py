r"""A GRPO step by what leaves the device: with ``offload=true`` and ``auto`` beside the
step where all stay.

    python benchmarks/offload_step.py --shape 1.5b --prompts 64 --tokens 1024
    python benchmarks/offload_step.py rollout.kv_cache_gib=0 rollout.gpu_memory_gib=60 \
        --modes auto true
    python benchmarks/offload_step.py --shape tiny --prompts 2 --samples 2 --tokens 8

Each mode is a job in a process of its own, on random weights, with completions as long
as allowed. The jobs start one after the other and then take a step each by turns, so
that all of them have to fit: one that waits holds what its mode leaves on the device.
Printed are the median of each phase, of every other ``time/*`` and ``memory/*`` metric
that a step has, and the ratio of the steps of a turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import turns
from grpo_step import ENGINES, PHASES, WARM_UP, composed_of, run_job, write_job
from shapes import SHAPES
from sides import Paced, Side, spread

MODES = ("false", "true", "auto")
KEYS = ("time/step", *PHASES)


def be_job(arguments: argparse.Namespace) -> None:
    """Be the job of one mode, whose steps the script asks for."""
    turns.after.append(Paced())
    settings = [
        f"offload={arguments.mode}",
        f"run_dir={arguments.folder / 'run'}",
        "trackers=[console,jsonl,turns]",
    ]
    # The first step tells that it has started.
    arguments.steps += 1 + arguments.warm_up
    with redirect_stdout(sys.stderr):
        composed = composed_of(arguments, arguments.folder.parent, *settings)
        run_job(*composed, arguments.folder)


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """Let the jobs of all modes take steps by turns, and print them."""
    write_job(folder, arguments.shape)
    sides = {
        mode: Side(__file__, *sys.argv[1:], f"--mode={mode}", f"--folder={folder / mode}").ready()
        for mode in arguments.modes
    }
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in sides}
    for _ in range(arguments.warm_up + arguments.steps):
        for mode, side in sides.items():
            rows[mode].append(side.measure())
    rows = {mode: found[arguments.warm_up :] for mode, found in rows.items()}
    for mode, found in rows.items():
        report(mode, found)
    first, *others = arguments.modes
    for mode in others:
        ratios = [
            ours["time/step"] / theirs["time/step"]
            for ours, theirs in zip(rows[mode], rows[first], strict=True)
        ]
        print(
            f"RESULT offload={mode} takes {spread(ratios)} times the step with offload={first}",
            flush=True,
        )
    for side in sides.values():
        side.close()


def report(mode: str, rows: list[dict[str, float]]) -> None:
    """Print the medians of one mode."""
    found = {key for row in rows for key in row if key.startswith(("time/", "memory/"))}
    middle = {key: statistics.median(row.get(key, 0.0) for row in rows) for key in {*found, *KEYS}}
    split = ", ".join(f"{key.removeprefix('time/')} {middle[key]:.3f}" for key in KEYS)
    print(f"RESULT offload={mode}: {split} s")
    for key in sorted(middle.keys() - {*KEYS}):
        print(f"  {key} {middle[key]:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--rollout", choices=ENGINES, default="vllm")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each completion")
    parser.add_argument("--steps", type=int, default=8, help="of each mode, after --warm-up")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps that do not count")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["false", "true"])
    parser.add_argument("--mode", choices=MODES, help="be one job; the script starts them")
    parser.add_argument("--folder", type=Path, help="of one job, beside the model")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of the jobs")
    arguments = parser.parse_args()

    if arguments.mode:
        be_job(arguments)
        return
    os.environ["COUPLER_PLUGINS"] = "turns"
    with tempfile.TemporaryDirectory() as name:
        compare(arguments, Path(name))


if __name__ == "__main__":
    main()
