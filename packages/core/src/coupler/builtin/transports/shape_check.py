"""Hold what a sender announces against the receiver's own model, before it comes."""

from __future__ import annotations

from collections.abc import Sequence

from coupler.errors import WeightSyncError
from coupler.interfaces import Shapes


def check_fits(name: str, shape: Sequence[int], shapes: Shapes) -> None:
    """Compare the shape of a tensor with that of the same name in ``shapes``, if any.

    Raises:
        WeightSyncError: they have different shapes.
    """
    own = shapes.get(name)
    if own is not None and tuple(shape) != tuple(own):
        raise WeightSyncError(
            f"{name} comes with shape {list(shape)}, and the rollout's model has {list(own)}.\n"
            "  look at:  model.path, and whether engine and rollout have the same architecture"
        )
