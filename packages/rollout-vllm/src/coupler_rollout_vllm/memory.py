"""Device memory of a vLLM worker, given back and taken again by part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coupler.interfaces import Memory


def sleep(worker: Any, parts: Iterable[Memory]) -> int:
    return 0


def wake(worker: Any, parts: Iterable[Memory]) -> int:
    return 0
