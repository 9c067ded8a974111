"""Time runs of single turns: this checkout against another one, by turns.

    python benchmarks/single_turn.py --against FOLDER [--pairs 9] [--steps 60]

Each is a whole ``coupler train`` on the toy backends, of 8 prompts x 16 completions a
step, so that next to nothing but core is timed. Printed is the ratio of processor time
and of wall time, ours over theirs: the median over the pairs, and its quartiles. Both
checkouts use the packages of this interpreter.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from coupler.testing.models import write_tokenizer, write_toy

HERE = Path(__file__).resolve().parents[1]
START = "import sys; from coupler.cli import main; sys.exit(main(sys.argv[1:]))"
OPTIONS = (
    "engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy", "trackers=[jsonl]",
    "data.max_prompt_tokens=64", "sampling.max_tokens=16", "prompts_per_step=8",
    "samples_per_prompt=16", "reward.num_workers=1", "record.every_steps=0",
    "checkpoint.every_steps=0",
)  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Write a toy model, rows and a reward."""
    write_toy(folder / "toy")
    write_tokenizer(folder / "toy")
    lines = [f'{{"prompt": "what is {i} + 2 ?", "answer": "{i + 2}"}}\n' for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text("def score(completion):\n    return len(set(completion))\n")


def run(checkout: Path, inputs: Path, run_dir: Path, steps: int) -> tuple[float, float]:
    """Train, and return seconds of the processor and of the clock."""
    sources = os.pathsep.join(map(str, checkout.glob("packages/*/src")))
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()

    subprocess.run(
        [
            *(sys.executable, "-c", START, "train", *OPTIONS, f"steps={steps}"),
            *(f"model.path={inputs / 'toy'}", f"data.source={inputs / 'rows.jsonl'}"),
            *(f"reward.target={inputs / 'reward.py'}:score", f"run_dir={run_dir}"),
        ],
        env={**os.environ, "PYTHONPATH": sources},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True, help="another checkout")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    ratios: list[tuple[float, float]] = []

    with TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for pair in range(arguments.pairs):
            found: dict[Path, tuple[float, float]] = {}
            sides = [HERE, arguments.against.resolve()]
            for side in sides if pair % 2 else sides[::-1]:
                run_dir = folder / f"run-{pair}-{len(found)}"
                found[side] = run(side, folder, run_dir, arguments.steps)
            ours, theirs = (found[side] for side in sides)
            ratios.append((ours[0] / theirs[0], ours[1] / theirs[1]))
            print(f"pair {pair}: processor {ratios[-1][0]:.3f}, wall {ratios[-1][1]:.3f}")

    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.python_version()}")
    for what, of in (("processor", 0), ("wall", 1)):
        low, middle, high = statistics.quantiles((ratio[of] for ratio in ratios), n=4)
        print(f"{what} time, ours over theirs: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
