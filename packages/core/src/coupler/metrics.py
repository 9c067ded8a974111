"""Metrics that merge exactly over micro-batches, mini-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """A sum with its weight. ``mean`` and ``sum`` add both; ``max`` and ``min`` compare totals.

    ``total`` and ``weight`` may be 0-d tensors inside a loss: :func:`read` turns them into floats, once per step.

    Example:
        ``Metric((ratio > 1.2).sum(), mask.sum())`` is a clip fraction; merging two of them gives the fraction of both.
    """

    total: Any
    weight: Any = 1.0
    how: Literal["mean", "sum", "max", "min"] = "mean"

    @property
    def value(self) -> float:
        if self.how != "mean":
            return float(self.total)
        return float(self.total) / float(self.weight) if float(self.weight) else 0.0

    def __or__(self, other: Metric) -> Metric:
        if self.how != other.how:
            raise ValueError(f"cannot merge a {self.how} metric with a {other.how} metric")
        if self.how == "max":
            return self if bool(self.total >= other.total) else other
        if self.how == "min":
            return self if bool(self.total <= other.total) else other
        return Metric(self.total + other.total, self.weight + other.weight, self.how)


Metrics = dict[str, Metric]


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge metrics of the same name over all ``parts``."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] | metric if name in merged else metric
    return merged


def read(metrics: Mapping[str, Metric]) -> Metrics:
    """Turn 0-d tensors into floats; call it once per step, since each read waits for the device."""
    return {name: Metric(float(m.total), float(m.weight), m.how) for name, m in metrics.items()}


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The number that each metric stands for; a mean of nothing stands for none."""
    return {name: metric.value for name, metric in metrics.items() if metric.how != "mean" or float(metric.weight)}
