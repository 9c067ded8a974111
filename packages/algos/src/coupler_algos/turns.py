"""Put the sampled tokens of a batch in the order in which they were sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coupler.batch import Batch


@dataclass(frozen=True, slots=True)
class Sampled:
    """The n tokens under ``loss_mask``, by trajectory, in the order of sampling.

    Rows of one trajectory may hold its turns in another order: the column ``turn`` says
    which came first.

    Attributes:
        rows: [n] the places of the tokens in the batch.
        trajectory: [n] the trajectory of each, by :meth:`Batch.trajectories`.
        turn: [n] the number of its turn in the trajectory.
    """

    rows: np.ndarray
    trajectory: np.ndarray
    turn: np.ndarray

    @classmethod
    def of(cls, batch: Batch) -> Sampled:
        """Sort the tokens of a batch with the column ``turn``."""
        rows = np.flatnonzero(batch["loss_mask"])
        turn = batch["turn"][rows]
        trajectory = batch.spread(batch.trajectories()[1])[rows]
        within = rows - batch.spread(batch.starts[:-1])[rows]

        order = np.lexsort((within, turn, trajectory))
        return cls(
            rows[order],
            trajectory[order],
            turn[order],
        )

    def turns(self) -> tuple[np.ndarray, np.ndarray]:
        """Find the turns.

        Returns:
            [m] the first token of each turn, and [n] the turn of each token.
        """
        begins = np.ones(len(self.rows), bool)
        begins[1:] = self.trajectory[1:] != self.trajectory[:-1]
        begins[1:] |= self.turn[1:] != self.turn[:-1]
        return np.flatnonzero(begins), np.cumsum(begins) - 1
