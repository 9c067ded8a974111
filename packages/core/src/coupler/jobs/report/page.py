"""Lay the report out and write it as one file of HTML that needs no network."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from coupler.errors import CouplerError
from coupler.jobs.report import drawing
from coupler.jobs.report.costs import PHASES, REST, Time, memory, times
from coupler.jobs.report.groups import Curve, Group, differences, group
from coupler.jobs.report.reading import Run, read_runs
from coupler.system.files import write_whole, writing
from coupler.system.log import get_logger
from coupler.system.terminal import harmless

log = get_logger(__name__)

# Metrics that get a chart where a run has them: name, title, and unit.
CURVES = (
    ("sampled/reward", "Reward of all samples", "reward"),
    ("reward/mean", "Reward of what was trained on", "reward"),
    ("eval/reward", "Held-out reward", "reward"),
    ("nll", "Negative log-likelihood", "nats per token"),
    ("eval/nll", "Held-out negative log-likelihood", "nats per token"),
    ("eval/loss", "Held-out loss", "loss"),
    ("rewards/margin", "Margin of preferences", "implied reward"),
    ("rewards/accuracy", "Preferences ranked right", "share"),
    ("kl_ref", "KL from the reference", "nats per token"),
    ("train_infer/kl", "KL between engine and rollout", "nats per token"),
    ("entropy", "Entropy", "nats per token"),
    ("train/grad_norm", "Gradient norm before clipping", "norm"),
    ("sampled/completion_tokens", "Length of a completion", "tokens"),
    ("sampled/truncated", "Completions cut at the limit", "share"),
    ("sampled/equal_reward_groups", "Prompts of equal rewards", "share"),
    ("critic/explained_variance", "Explained variance of the critic", "share"),
    ("train/lr", "Learning rate", "rate"),
    ("time/tokens_per_second", "Speed", "tokens/s"),
)
# Points of one chart, shared by its curves, and letters of all samples.
MAX_POINTS, MAX_LETTERS = 300, 30_000
SAMPLES = 6
COLORS = 7


def report(folders: Sequence[Path], file: Path) -> None:
    """Compare the runs in ``folders`` on the page ``file``.

    What cannot be shown is named on the page and in the log.

    Raises:
        CouplerError: no run can be shown, or ``file`` cannot be written.
    """
    if file.suffix != ".html" or os.path.isdir(file):
        raise CouplerError(f"--html {file} names no file that ends in .html.")
    runs, notes = read_runs(folders)
    notes = [*notes, *(note for run in runs for note in run.notes)]

    page = render(runs, notes)
    with writing(f"the report {file}"):
        write_whole(file, page)
    for note in notes:
        log.warning(note)


def render(runs: Sequence[Run], notes: Sequence[str]) -> str:
    """Return the page. Every text in it is escaped, whoever wrote it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = environment.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.filters["number"] = drawing.number

    groups = group(runs)
    charts, held = list(_charts(groups)), memory(groups)
    return environment.get_template("page.html").render(
        title=f"Coupler: {', '.join(each.name for each in groups)}",
        notes=notes,
        groups=groups,
        colors=COLORS,
        charts=charts,
        numbers=[{**chart["frame"], "curves": chart["curves"]} for chart in charts],
        differences=differences(groups),
        time=_time(groups),
        phases=[*PHASES, REST],
        memory=held,
        most=max((size or 0.0 for *_, sizes in held for size in sizes), default=0.0) or 1.0,
        samples=[_samples(run, MAX_LETTERS // len(runs)) for run in runs if run.samples],
        size=drawing,
        digest=digest,
    )


def _printable(value: Any) -> Any:
    """Replace what has no glyph, such as a control character, or a lone surrogate that
    no file can hold. What Jinja2 has escaped already stays.
    """
    return value if hasattr(value, "__html__") else harmless(str(value).expandtabs(4), lines=True)


def _charts(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the charts of metrics that at least one group has."""
    last = max(step for each in groups for run in each.runs for step in run.steps)
    x = drawing.across(last)
    for metric, title, unit in CURVES:
        curves = {i: c for i, each in enumerate(groups) if (c := each.curve(metric))}
        if not curves:
            continue

        low = min(float(curve.low.min()) for curve in curves.values())
        high = max(float(curve.high.max()) for curve in curves.values())
        y = drawing.upward(low, high)
        limit = max(MAX_POINTS // len(curves), 30)
        thin = {i: curve.thinned(limit) for i, curve in curves.items()}
        yield {
            "metric": metric,
            "title": title,
            "unit": unit,
            "left_out": sum(curve.left_out for curve in curves.values()),
            "x": x.ticks(whole=True),
            "y": y.ticks(),
            "frame": {
                "last": x.high,
                "left": x.start,
                "right": x.end,
                "top": y.end,
                "bottom": y.start,
            },
            "lines": [(i, drawing.line(c, x, y), drawing.band(c, x, y)) for i, c in thin.items()],
            "curves": [_numbers(i, groups[i], curve) for i, curve in thin.items()],
            "ends": [_end(curves.get(i)) for i in range(len(groups))],
        }


def _numbers(index: int, group: Group, curve: Curve) -> dict[str, Any]:
    """Return what the script reads of a curve, at the precision that it shows."""
    parts = {"mean": curve.mean, "low": curve.low, "high": curve.high}
    if len(group.runs) == 1:
        parts = {"mean": curve.mean}
    shown = {name: [float(f"{v:.4g}") for v in values] for name, values in parts.items()}
    return {"group": index, "steps": curve.steps.tolist(), **shown}


def _end(curve: Curve | None) -> dict[str, float] | None:
    """Return the last value of a curve, and the mean over the last tenth of its
    steps.
    """
    if curve is None:
        return None
    tenth = max(len(curve.steps) // 10, 1)
    return {
        "step": int(curve.steps[-1]),
        "last": float(curve.mean[-1]),
        "low": float(curve.low[-1]),
        "high": float(curve.high[-1]),
        "mean": float(curve.mean[-tenth:].mean()),
    }


def _time(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the stacked columns of each group that was timed, on one scale."""
    timed: list[tuple[int, Time]] = [(i, t) for i, each in enumerate(groups) if (t := times(each))]
    longest = max((float(time.tops[-1].max()) for _, time in timed), default=1.0)
    y = drawing.Axis(0, longest * 1.05, drawing.HEIGHT - drawing.BOTTOM, drawing.TOP)

    found = []
    for index, time in timed:
        stretches = time.tops.shape[1]
        x = drawing.Axis(0, stretches, drawing.LEFT, drawing.WIDTH - drawing.RIGHT)
        labels = sorted({0, stretches // 2, stretches - 1})
        found.append(
            {
                "group": index,
                "layers": drawing.columns(time.tops, x, y),
                "x": [(x.at(i + 0.5), time.edges[i]) for i in labels],
                "y": y.ticks(),
                "means": [*map(float, time.means)],
                "total": float(time.means.sum()),
            }
        )
    return found


def _samples(run: Run, letters: int) -> dict[str, Any]:
    """Return the samples of a run's last kept step: the best, the middle and the
    worst.
    """
    ranked = sorted(run.samples, key=_reward, reverse=True)
    n, shown = len(ranked), min(SAMPLES, len(ranked))
    chosen = sorted({round(i * (n - 1) / max(shown - 1, 1)) for i in range(shown)})
    room = max(letters // (2 * shown), 100)

    return {
        "run": run.name,
        "step": ranked[0].get("step", ""),
        "number": n,
        "rewards": [_reward(line) for line in ranked],
        "lines": [
            {
                "reward": _reward(ranked[i]),
                "rank": i + 1,
                "finish": str(ranked[i]["finish"]),
                "tokens": ranked[i].get("tokens", ""),
                # The question ends a prompt, and what precedes it is often the same.
                "prompt": _ending(_text(ranked[i], "prompt"), room),
                "completion": _beginning(_text(ranked[i], "completion"), room),
            }
            for i in chosen
        ],
    }


def _reward(line: Mapping[str, Any]) -> float:
    return float(line["reward"])


def _text(line: Mapping[str, Any], key: str) -> str:
    return str(line.get(key, ""))


def _ending(text: str, room: int) -> str:
    return text if len(text) <= room else f"\u2026{text[-room:]}"


def _beginning(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[:room]}\u2026"
