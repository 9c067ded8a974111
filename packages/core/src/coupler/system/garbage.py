"""Keep Python's garbage collector out of the steps of a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """Exempt what exists by now from collection; amid a step it would walk through all that was imported."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
