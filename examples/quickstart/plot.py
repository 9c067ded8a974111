"""Draw one metric of some runs as a picture for a paper, 1,600 by 800 pixels.

``python examples/quickstart/plot.py RUN... --out reward.png``. Runs that differ by
their seed alone share a line: their mean, in a band from the smallest to the largest.
Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from coupler.errors import CouplerError
from coupler.jobs.report.groups import group
from coupler.jobs.report.reading import read_runs

REWARD = "sampled/reward"


def draw(folders: Sequence[Path], path: Path, metric: str = REWARD, label: str = "") -> None:
    """Draw ``metric`` of the runs in ``folders`` over their steps.

    Args:
        label: of the vertical axis. Empty is the name of the metric.

    Raises:
        CouplerError: no run can be read.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    runs, notes = read_runs(folders)
    for note in notes:
        print(note, file=sys.stderr)
    figure, axes = pyplot.subplots(figsize=(8, 4), dpi=200, layout="constrained")
    for each in group(runs):
        if curve := each.curve(metric):
            axes.plot(curve.steps, curve.mean, label=each.name)
            axes.fill_between(curve.steps, curve.low, curve.high, alpha=0.2, linewidth=0)

    axes.set(xlabel="training step", ylabel=label or metric)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("reward.png"), metavar="FILE")
    parser.add_argument("--metric", default=REWARD, help="default: %(default)s")
    parser.add_argument("--label", default="", help="with its unit; default: the metric")
    arguments = parser.parse_args()
    try:
        draw(arguments.runs, arguments.out, arguments.metric, arguments.label)
    except CouplerError as error:
        print(f"plot: {error}", file=sys.stderr)
        sys.exit(2)
