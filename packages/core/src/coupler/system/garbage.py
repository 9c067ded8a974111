"""Keep Python's garbage collector out of the steps of a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = (100_000, 20, 10_000)
"""Of new objects, and of collections of the generation before, for each generation."""


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """Exempt the objects that exist by now from collection, and collect seldom. The
    caller calls :func:`gc.collect` after each step.

    A whole collection amid a step would walk through all that was imported, and through
    the conversations of thousands of episodes.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
