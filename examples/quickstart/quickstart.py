"""Warm-start a small language model, train it with GRPO, and score it on held-out
problems: ``make quickstart``.

``make quickstart ARGS="--algorithm ppo"`` trains it with PPO and a critic instead.

Everything it does is a job of the command line too; ``config.yaml`` in each stage of
the run folder says which.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from coupler.config.schema import Job
from coupler.errors import CouplerError

HERE = Path(__file__).parent
TRAIN = {"grpo": "train.yaml", "ppo": "ppo.yaml"}


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")
    )
    parser.add_argument("--algorithm", choices=TRAIN, default="grpo")
    parser.add_argument("--sft-steps", type=int, help="of the warm start; default: sft.yaml's")
    parser.add_argument(
        "--held-out", type=int, default=0, help="score on so many held-out problems; default: all"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="options of the reinforcement-learning run",
    )
    arguments = parser.parse_args()
    # of a dependency of reasoning-gym
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    more = {
        Job.SFT: [] if arguments.sft_steps is None else [f"steps={arguments.sft_steps}"],
        Job.TRAIN: arguments.overrides,
        Job.EVAL: [f"eval.data.limit={arguments.held_out}"],
    }
    try:
        results = run(arguments.run_dir, arguments.seed, arguments.algorithm, more)
    except CouplerError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        sys.exit(2)
    show(results, arguments.run_dir)
    scores = " ".join(f"{stage}={accuracy:.2f}" for stage, accuracy in results.items())
    print(f"quickstart: {scores} seconds={time.perf_counter() - start:.0f}")


def run(folder: Path, seed: int, algorithm: str, more: Mapping[Job, list[str]]) -> dict[str, float]:
    """Run all stages, each with the options of its job in ``more``.

    Returns:
        The held-out accuracy before, after ``sft``, and after the algorithm, by these
        names.
    """
    from model import build
    from task import problems

    from coupler import jobs
    from coupler.config.compose import Composed, compose
    from coupler.plugins.manager import Plugins

    plugins = Plugins.load()

    def stage(job: Job, name: str, model: str) -> tuple[Job, Composed]:
        given = [
            f"model.path={folder / model}",
            f"run_dir={folder / name}",
            f"seed={seed}",
            *more[job],
        ]
        file = TRAIN[algorithm] if job is Job.TRAIN else f"{job}.yaml"
        return job, compose(plugins, given, str(HERE / file), job)

    stages = {  # composed before any runs: a misspelt option shows at once
        "eval_before": stage(Job.EVAL, "eval_before", "model"),
        "sft": stage(Job.SFT, "sft", "model"),
        "eval_sft": stage(Job.EVAL, "eval_sft", "sft/export"),
        algorithm: stage(Job.TRAIN, algorithm, "sft/export"),
        "eval": stage(Job.EVAL, f"eval_{algorithm}", f"{algorithm}/export"),
    }
    texts = [row["prompt"] for row in problems(size=20_000, seed=0)]
    size = build(folder / "model", texts, seed)
    print(f"model: Llama, {size:,} random parameters; task: {len(texts)} words to spell backward\n")

    start = {Job.SFT: jobs.supervise, Job.TRAIN: jobs.train, Job.EVAL: jobs.evaluate}
    last = {}
    for name, (job, composed) in stages.items():
        print(f"--- {Path(composed.config.run_dir).name}", flush=True)
        last[name] = start[job](composed, plugins)
    accuracies = (last[name]["eval/reward"] for name in ("eval_before", "eval_sft", "eval"))
    return dict(zip(("before", "sft", algorithm), accuracies, strict=True))


def show(results: dict[str, float], folder: Path) -> None:
    """Print the table and draw the reward curve."""
    from plot import draw

    algorithm = list(results)[-1]
    label = "mean reward of all samples (share right)"
    draw([folder / algorithm], folder / "reward.png", label=label)
    table = Table(title="accuracy on held-out problems, sampled at temperature 1")
    for heading in ("before", "after the warm start", f"after {algorithm.upper()}"):
        table.add_column(heading, justify="right")
    table.add_row(*(f"{accuracy:.3f}" for accuracy in results.values()))
    console = Console()
    console.print(table)
    console.print(f"  {folder / 'reward.png'}", soft_wrap=True)
    for name in ("config.yaml", "metrics.jsonl", "checkpoints", "export"):
        console.print(f"  {folder / algorithm / name}", soft_wrap=True)


if __name__ == "__main__":
    main()
