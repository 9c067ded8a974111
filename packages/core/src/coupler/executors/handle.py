"""Handle: the name that the controller has for one worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """One worker, as the controller sees it."""

    role: str
    index: int
    # the object itself, or the actor that holds it
    of: Any
