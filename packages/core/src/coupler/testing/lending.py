"""Carry weights to a rollout as strictly as a transport may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from coupler.builtin.transports.disk import DiskTransport
from coupler.interfaces import Named, Rank, Shapes, WeightUpdate


class LendingTransport(DiskTransport):
    """Takes each tensor back when the next one is asked for, and overwrites it.

    A transport that receives into one buffer does so.
    """

    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        for name, tensor in super().receive(update, worker, shapes):
            lent = np.array(tensor) if isinstance(tensor, np.ndarray) else tensor.clone()
            yield name, lent
            _spoil(lent)


def _spoil(tensor: Any) -> None:
    flat = tensor.reshape(-1)
    half = len(flat) // 2
    flat[:half] = 7
    flat[half:] = 0
