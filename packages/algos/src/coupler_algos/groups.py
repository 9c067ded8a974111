"""Compare the members of a prompt group with each other.

Membership comes from ids that core assigned, never from order or text.
"""

from __future__ import annotations

import numpy as np

from coupler.errors import CouplerError


class Groups:
    """Divide N members into prompt groups.

    Raises:
        CouplerError: a group has one member, which no other can be compared with.
    """

    def __init__(self, ids: np.ndarray) -> None:
        names, self._first, self._of = np.unique(ids, return_index=True, return_inverse=True)
        self._size = np.bincount(self._of)
        if (self._size == 1).any():
            alone = names[self._size == 1]
            raise CouplerError(
                f"{len(alone)} prompt groups have one sample and nothing to compare it with; "
                f"the first is {alone[0]}.\n"
                "  try:  samples_per_prompt=2 or more"
            )

    def centred(self, values: np.ndarray) -> np.ndarray:
        """Subtract the mean of the member's group from [N].

        The result is exactly 0 where all values of a group are equal.
        """
        shifted = values - values[self._first][self._of]
        return shifted - (np.bincount(self._of, shifted) / self._size)[self._of]

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return [N] the mean of each member's group."""
        return (np.bincount(self._of, values) / self._size)[self._of]

    def minus_weighted(self, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Subtract the weighted mean of the member's group from [N].

        The result is exactly 0 where all values of a group are equal. A group without
        weight has its plain mean.
        """
        total = np.bincount(self._of, weights)[self._of]
        weights = np.where(total > 0, weights, 1.0)
        shifted = values - values[self._first][self._of]
        mean = np.bincount(self._of, shifted * weights) / np.bincount(self._of, weights)
        return shifted - mean[self._of]

    def std(self, values: np.ndarray) -> np.ndarray:
        """Return [N] the standard deviation of each member's group.

        It has Bessel's correction.
        """
        variance = np.bincount(self._of, self.centred(values) ** 2) / (self._size - 1)
        return np.sqrt(variance)[self._of]

    def minus_others(self, values: np.ndarray) -> np.ndarray:
        """Subtract the mean of the *other* members of the group from [N].

        The result is n / (n - 1) times :meth:`centred`.
        """
        return self.centred(values) * (self._size / (self._size - 1))[self._of]
