"""Know what a run does at this moment, for what shows it to a person."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_entered: list[str] = []


@asynccontextmanager
async def entered(phase: str) -> AsyncIterator[None]:
    """Let :func:`now` say ``phase`` within this context."""
    _entered.append(phase)
    try:
        yield
    finally:
        _entered.remove(phase)


def now() -> str:
    """Return the phase that was entered last of those that last, or an empty text."""
    return _entered[-1] if _entered else ""
