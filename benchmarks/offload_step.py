r"""A GRPO step by what leaves the device: with ``offload=true`` and ``auto`` beside the
step where all stay.

    python benchmarks/offload_step.py --shape 1.5b --prompts 64 --tokens 1024
    python benchmarks/offload_step.py rollout.kv_cache_gib=0 rollout.gpu_memory_gib=60 \
        --modes auto true
    python benchmarks/offload_step.py --shape tiny --prompts 2 --samples 2 --tokens 8

Each mode is a job in a process of its own, on random weights, with completions as long
as allowed. It prints the median of each phase, of every other ``time/*`` and
``memory/*`` metric that a step has, and the ratio of whole steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from grpo_step import ENGINES, PHASES, WARM_UP, composed_of, run_job, write_job
from shapes import SHAPES

MODES = ("false", "true", "auto")


def run(mode: str, folder: Path) -> dict[str, float]:
    """Run the job of one mode in a folder, and return the medians of its metrics."""
    command = [sys.executable, __file__, *sys.argv[1:], f"--mode={mode}", f"--folder={folder}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--rollout", choices=ENGINES, default="vllm")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each completion")
    parser.add_argument("--steps", type=int, default=8, help=f"of each mode, after {WARM_UP}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["false", "true"])
    parser.add_argument("--mode", choices=MODES, help="be one job; the script starts both")
    parser.add_argument("--folder", type=Path, help="of one job, beside the model")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of the job")
    arguments = parser.parse_args()

    if arguments.mode:
        arguments.steps += WARM_UP
        arguments.settings += [f"offload={arguments.mode}", f"run_dir={arguments.folder / 'run'}"]
        arguments.settings += ["trackers=[console,jsonl]"]
        with redirect_stdout(sys.stderr):
            rows = run_job(*composed_of(arguments, arguments.folder.parent), arguments.folder)
        found = {key for row in rows for key in row if key.startswith(("time/", "memory/"))}
        medians = {
            key: statistics.median(row.get(key, 0.0) for row in rows) for key in {*found, *KEYS}
        }
        print(json.dumps(medians))
        return

    steps = {}
    with tempfile.TemporaryDirectory() as name:
        write_job(Path(name), arguments.shape)
        for mode in arguments.modes:
            medians = run(mode, Path(name) / mode)
            steps[mode] = medians["time/step"]
            split = ", ".join(f"{key.removeprefix('time/')} {medians[key]:.3f}" for key in KEYS)
            print(f"RESULT offload={mode}: {split} s")
            for key in sorted(medians.keys() - {*KEYS}):
                print(f"  {key} {medians[key]:.3f}", flush=True)
    first = arguments.modes[0]
    for mode in arguments.modes[1:]:
        ratio = steps[mode] / steps[first]
        print(f"RESULT offload={mode} takes {ratio:.3f} of the step with offload={first}")


KEYS = ("time/step", *PHASES)


if __name__ == "__main__":
    main()
