"""Draw the curve of a run for its trackers."""

from __future__ import annotations

from pathlib import Path

from coupler.run.history import numbers_of
from coupler.system.log import get_logger

# The first of them that a run has is drawn.
DRAWN = ("reward/mean", "loss")
PICTURE = "reward.png"

log = get_logger(__name__)


def draw_reward(run_dir: Path) -> Path | None:
    """Write ``reward.png``: the mean reward of each step, or the loss where a run has
    no reward.

    Returns:
        the file, or None without matplotlib, without ``metrics.jsonl``, or without two
        steps in it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    rows = numbers_of(run_dir)
    name = next((each for each in DRAWN if any(each in row for row in rows)), "")
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if len(points) < 2:
        return None

    figure = Figure(figsize=(6.4, 4.0), layout="tight")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True))
    axes.set(xlabel="step", ylabel=name, title=run_dir.resolve().name)
    try:
        figure.savefig(run_dir / PICTURE)
    # No picture is worth a run, whatever a library makes of odd numbers.
    except Exception as error:
        log.warning(f"{run_dir / PICTURE} cannot be written: {error}.")
        return None
    return run_dir / PICTURE
