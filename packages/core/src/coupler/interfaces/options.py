"""Declare facts about an option beside its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")

NO_EFFECT: Mapping[str, bool] = {"affects_results": False}  # metadata of a field


def no_effect(default: T, **metadata: Any) -> T:
    """Give an option its default, and declare that no result of a run depends on it.

    A run goes on in its folder with any other value of such an option. Options of
    memory, placement, logging, limits and profiling are of this kind. So is one that
    only changes the last bits of a sum, by another order of additions.

    Example:
        ``max_tokens_per_gpu: int = no_effect(16384)``, or with a bound
        ``no_effect(16384, ge=1)``. A mutable default is written as
        ``field(default_factory=list, metadata=NO_EFFECT)``.
    """
    return field(default=default, metadata={**NO_EFFECT, **metadata})
