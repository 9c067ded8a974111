"""Hold calls to leave their batch and the random generators of the process alone."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from coupler.batch import Batch
from coupler.errors import CouplerError


def read_only(path: str) -> Batch:
    """Read a batch whose columns cannot be written into."""
    batch = Batch.load(Path(path))
    for column in (batch.lengths, *batch.tokens.values(), *batch.seqs.values()):
        column.flags.writeable = False
    return batch


@contextlib.contextmanager
def left_alone(batch: Batch) -> Iterator[Batch]:
    """Fail where columns of the batch come, go, are replaced or are written into."""
    columns = dict(batch.tokens), dict(batch.seqs)
    contents = {name: batch[name].tobytes() for name in (*batch.tokens, *batch.seqs)}
    yield batch

    for before, after in zip(columns, (batch.tokens, batch.seqs), strict=True):
        if changed := sorted(
            name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)
        ):
            raise CouplerError(
                f"expected the columns of the batch as they were, {changed[0]!r} changed."
            )
    for name, before in contents.items():
        if batch[name].tobytes() != before:
            raise CouplerError(f"expected the column {name!r} as it was, it was written into.")


def generators() -> dict[str, str]:
    """Return a hash of the state of each global random generator, by its name."""
    states = {
        "random": repr(random.getstate()),
        "numpy.random": repr(np.random.get_state()),
    }
    if torch := sys.modules.get("torch"):
        states["torch"] = torch.get_rng_state().numpy().tobytes().hex()
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in states.items()}
