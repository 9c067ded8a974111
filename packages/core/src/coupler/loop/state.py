"""State: where a run stands between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coupler.batch import Batch


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands between two steps, beside what engines hold."""

    plain: Mapping[str, Any]  # what JSON can hold
    groups: Mapping[int, Batch] = field(default_factory=dict)  # scored and not yet trained on, by admission number
