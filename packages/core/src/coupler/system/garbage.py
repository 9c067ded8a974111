"""Keep Python's garbage collector out of the steps of a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """Exempt the objects that exist by now from collection.

    A collection amid a step would walk through all that was imported.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
