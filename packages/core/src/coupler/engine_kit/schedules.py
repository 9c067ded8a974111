"""Compute learning-rate schedules: pure functions of the optimizer step, in multiples
of the configured rate.

``step`` counts the optimizer steps done before this one. No step of a run is wasted at
a rate of 0: the first of ``warmup`` steps is already one of as many equal steps above
``init``, and a fall ends at ``step == total``, after the last one.
"""

from __future__ import annotations

import math


def constant(step: int, *, warmup: int = 0, init: float = 0.0) -> float:
    """Rise from ``init`` to 1 in a straight line over ``warmup`` steps and stay
    there.
    """
    return init + (1 - init) * min((step + 1) / warmup, 1.0) if warmup else 1.0


def linear(
    step: int, *, total: int, warmup: int = 0, init: float = 0.0, floor: float = 0.0
) -> float:
    """Fall from 1 to ``floor`` in a straight line after the warm-up."""
    return constant(step, warmup=warmup, init=init) * (
        1 - (1 - floor) * _progress(step, warmup, total)
    )


def cosine(
    step: int,
    *,
    total: int,
    warmup: int = 0,
    init: float = 0.0,
    floor: float = 0.0,
    cycles: float = 0.5,
) -> float:
    """Go from 1 to ``floor`` and back along a cosine after the warm-up. Its ``cycles``
    end at ``total``.

    Half a cycle is one fall, SGDR (arXiv 1608.03983) eq. 5 without restarts; a whole
    one ends where it began.
    """
    fallen = (1 - math.cos(2 * math.pi * cycles * _progress(step, warmup, total))) / 2
    return constant(step, warmup=warmup, init=init) * (1 - (1 - floor) * fallen)


def wsd(
    step: int, *, total: int, decay: int, warmup: int = 0, init: float = 0.0, floor: float = 0.0
) -> float:
    """Stay at 1, then fall in a straight line over the last ``decay`` steps: MiniCPM
    (arXiv 2404.06395) section 4.2.
    """
    return constant(step, warmup=warmup, init=init) * (
        1 - (1 - floor) * _progress(step, total - decay, total)
    )


def _progress(step: int, start: int, end: int) -> float:
    """Return 0 up to ``start``, and 1 from ``end`` on."""
    return min(max((step - start) / (end - start), 0.0), 1.0) if end > start else float(step >= end)
