"""Facts about an option that its configuration class states beside the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")

NO_EFFECT: Mapping[str, bool] = {"affects_results": False}  # metadata of a field


def no_effect(default: T, **metadata: Any) -> T:
    """Give an option its default, and say that no result of a run depends on it.

    A run goes on in its folder whatever such an option is by then. Options of memory,
    placement, logging, limits and profiling are of this kind. One that changes the
    last bits of a sum, as another order of additions does, is too.

    Example:
        ``max_tokens_per_gpu: int = no_effect(16384)``, with a bound
        ``no_effect(16384, ge=1)``; where the default is made anew
        each time, ``field(default_factory=list, metadata=NO_EFFECT)``.
    """
    return field(default=default, metadata={**NO_EFFECT, **metadata})
