"""Merge metrics exactly over micro-batches, mini-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coupler.errors import CouplerError


@dataclass(frozen=True, slots=True)
class Metric:
    """A sum with its weight.

    ``mean`` and ``sum`` add both, ``max`` and ``min`` compare totals. ``total`` and
    ``weight`` may be 0-d tensors inside a loss. :func:`read` turns them into floats,
    once per step.

    Example:
        ``Metric((ratio > 1.2).sum(), mask.sum())`` is a clip fraction. Merging two of
        them gives the fraction of both.
    """

    total: Any
    weight: Any = 1.0
    how: Literal["mean", "sum", "max", "min"] = "mean"

    @property
    def value(self) -> float:
        """Return the number that this metric stands for."""
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
    """Turn 0-d tensors into floats.

    Each read waits for the device, so it is called once per step.
    """
    return {name: Metric(float(m.total), float(m.weight), m.how) for name, m in metrics.items()}


def given(metrics: Mapping[str, Metric], whose: str) -> Metrics:
    """Return the metrics that a plugin gave, as floats.

    Raises:
        CouplerError: they are no metrics. The message names ``whose`` they are.
    """
    try:
        return read(metrics)
    except (AttributeError, TypeError, ValueError) as error:
        raise CouplerError(f"{whose} returned what are no metrics: {error}.") from error


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the number of each metric, without means of nothing."""
    return {
        name: metric.value
        for name, metric in metrics.items()
        if metric.how != "mean" or float(metric.weight)
    }
