"""Turn numbers into the paths and ticks of SVG charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from coupler.jobs.report.groups import Curve

# Pixels of a chart, and of its margins left, right, top and bottom.
WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 64, 8, 8, 32


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values between ``low`` and ``high`` to pixels between ``start`` and
    ``end``.
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of a value, to a tenth."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, whole: bool = False) -> list[tuple[float, str]]:
        """Return pixel and label of about five round values.

        Args:
            whole: only integers, as for steps.
        """
        step = _round_step((self.high - self.low) / 4)
        step = max(step, 1.0) if whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(self.at(i * step), f"{i * step:.6g}") for i in range(first, last + 1)]


def number(value: float) -> str:
    """Write a value with four digits, or all that are left of the point."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def across(last: float) -> Axis:
    """Return the axis of steps, from 0 to ``last``."""
    return Axis(0, max(last, 1), LEFT, WIDTH - RIGHT)


def upward(low: float, high: float) -> Axis:
    """Return the axis of values, with room above and below them."""
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Axis(low - room, high + room, HEIGHT - BOTTOM, TOP)


def line(curve: Curve, x: Axis, y: Axis) -> str:
    """Return the path of the means. One value alone is a dot, by its round ends."""
    path = _path(curve.steps, curve.mean, x, y)
    return path if len(curve.steps) > 1 else f"{path}h0"


def band(curve: Curve, x: Axis, y: Axis) -> str:
    """Return the path around all values, or an empty text where each step has one."""
    if np.array_equal(curve.low, curve.high):
        return ""
    there = _path(curve.steps, curve.high, x, y)
    back = _path(curve.steps[::-1], curve.low[::-1], x, y)
    return f"{there}L{back[1:]}Z"


def columns(tops: np.ndarray, x: Axis, y: Axis) -> list[str]:
    """Return one path for each layer of stacked columns.

    Args:
        tops: upper ends [layers + 1, columns]. The first row is the ground.
        x: an axis of as many units as there are columns.
    """
    width = round(max(x.at(1) - x.at(0) - 1, 0.5), 1)
    return [
        "".join(
            f"M{x.at(i)},{y.at(low)}h{width}V{y.at(high)}h-{width}Z"
            for i, (low, high) in enumerate(zip(below, above, strict=True))
            if high > low
        )
        for below, above in pairwise(tops)
    ]


def _path(steps: Sequence[float] | np.ndarray, values: np.ndarray, x: Axis, y: Axis) -> str:
    pairs = zip(steps, values, strict=True)
    return "M" + " ".join(f"{x.at(step):g},{y.at(value):g}" for step, value in pairs)


def _round_step(size: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))
