"""Compare the members of a prompt group with each other.

Membership comes from ids that core assigned, never from order or text.
"""

from __future__ import annotations

import numpy as np

from coupler.errors import CouplerError

EPSILON = 1e-6
"""It is added to a standard deviation that advantages are divided by."""


class Groups:
    """Divide N members into prompt groups.

    Args:
        ids: [N] the group of each member.
        may_be_alone: whether a group may have one member only.

    Raises:
        CouplerError: a group has one member, which no other can be compared with.
    """

    def __init__(self, ids: np.ndarray, *, may_be_alone: bool = False) -> None:
        names, self._first, self._of = np.unique(
            ids,
            return_index=True,
            return_inverse=True,
        )
        self._size = np.bincount(self._of)

        if (self._size == 1).any() and not may_be_alone:
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
        weights = np.where(
            total > 0,
            weights,
            1.0,
        )
        shifted = values - values[self._first][self._of]
        mean = np.bincount(self._of, shifted * weights) / np.bincount(self._of, weights)
        return shifted - mean[self._of]

    def std(self, values: np.ndarray) -> np.ndarray:
        """Return [N] the standard deviation of each member's group.

        It has Bessel's correction, and is 0 for a member that is alone.
        """
        variance = np.bincount(self._of, self.centred(values) ** 2) / np.maximum(self._size - 1, 1)
        return np.sqrt(variance)[self._of]

    def minus_others(self, values: np.ndarray) -> np.ndarray:
        """Subtract the mean of the *other* members of the group from [N].

        The result is n / (n - 1) times :meth:`centred`.
        """
        return self.centred(values) * (self._size / (self._size - 1))[self._of]

    def best_minus_second(self, values: np.ndarray) -> np.ndarray:
        """Return [N] what the best member of each group is ahead of the second best,
        and 0 for all others.
        """
        order = np.lexsort((values, self._of))
        best = order[np.cumsum(self._size) - 1]
        second = order[np.maximum(np.cumsum(self._size) - 2, 0)]
        ahead = np.zeros(len(values))
        ahead[best] = values[best] - values[second]
        return ahead

    def differ(self, values: np.ndarray) -> np.ndarray:
        """Return [N] true in groups whose values are not all equal."""
        return np.bincount(self._of, values != values[self._first][self._of])[self._of] > 0
