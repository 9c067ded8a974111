"""Define the state of a run between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coupler.batch import Batch


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run between two steps, without that of its engines.

    Attributes:
        plain: values that JSON can hold.
        groups: groups that are scored and not yet trained on, by admission number.
    """

    plain: Mapping[str, Any]
    groups: Mapping[int, Batch] = field(default_factory=dict)
