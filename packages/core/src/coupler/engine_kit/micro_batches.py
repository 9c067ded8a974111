"""Cut a batch into micro-batches, as many on every rank, since each of them runs
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coupler.batch import Batch
from coupler.batch.partition import micro_batches, whole_units
from coupler.errors import CouplerError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

Rows = np.ndarray  # int64 indices of the sequences in one micro-batch


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason for which no rank may compute a batch, although one of them alone
    found it.
    """

    here: str  # the reason, on the rank that found it; empty on the others
    elsewhere: str  # the sentence of the others
    fix: str

    def error(self) -> CouplerError:
        return CouplerError(f"{self.here or self.elsewhere}\n  try:  {self.fix}")


def split(batch: Batch, max_tokens: int) -> list[Rows]:
    """Cut into micro-batches of ``max_tokens`` at most. Rows that share a ``unit`` stay
    together.

    Raises:
        ValueError: one unit alone is longer.
    """
    if "unit" not in batch.seqs:
        return micro_batches(batch.lengths, max_tokens)
    return split_by("unit", batch, max_tokens)


def split_by(column: str, batch: Batch, max_tokens: int) -> list[Rows]:
    """Cut as :func:`split` does. Rows of one number in ``column`` stay together."""
    _, unit = np.unique(batch[column], return_inverse=True)
    tokens = np.bincount(unit, weights=batch.lengths)
    too_long = np.flatnonzero((tokens > max_tokens) & (np.bincount(unit) > 1))

    if len(too_long):
        rows = batch.lengths[unit == too_long[0]]
        raise ValueError(
            f"{len(rows)} rows that the loss reads together (of one trajectory, say) have "
            f"{int(rows.sum())} tokens, which exceeds max_tokens_per_gpu={max_tokens}"
        )
    return whole_units(
        batch.lengths,
        batch[column],
        lambda sizes: micro_batches(sizes, max_tokens),
    )


def agreed_split(
    cut: Callable[[], list[Rows]],
    max_tokens_per_gpu: int,
    device: torch.device | None,
    groups: Sequence[ProcessGroup | None],
    *refusals: Refusal,
    multiple_of: int = 1,
    ranks_per_sequence: int = 1,
) -> list[Rows]:
    """Cut into as many micro-batches as the rank with the most has. Further ones are
    empty.

    Args:
        cut: returns the micro-batches of this rank, or raises a ``ValueError`` for a
            sequence that is too long.
        max_tokens_per_gpu: the option's value, for the message.
        device: holds the numbers that ranks compare. One rank compares none.
        groups: process groups that together join all ranks, None being the default one;
            empty for one rank.
        refusals: further reasons that ranks have to agree on.
        multiple_of: the number of micro-batches is a multiple of it.
        ranks_per_sequence: ranks that hold a micro-batch together, for the message.

    Raises:
        CouplerError: a rank, maybe another one, cannot compute its batch.
    """
    parts: list[Rows] = []
    problem = ""
    try:
        parts = cut()
    except ValueError as error:
        together = f" ({max_tokens_per_gpu} on each of {ranks_per_sequence} ranks)"
        problem = f"{error}{together if ranks_per_sequence > 1 else ''}."

    too_long = Refusal(
        problem,
        "another rank got a sequence that exceeds max_tokens_per_gpu.",
        f"engine.max_tokens_per_gpu above {max_tokens_per_gpu}, or shorter sequences",
    )
    reasons = (too_long, *refusals)
    count, *refused = _largest(
        [len(parts), *(bool(reason.here) for reason in reasons)], device, groups
    )
    for reason, holds in zip(reasons, refused, strict=True):
        if holds:
            raise reason.error()

    count = -(-count // multiple_of) * multiple_of
    return parts + [np.zeros(0, np.int64)] * (count - len(parts))


def _largest(
    values: list[int], device: torch.device | None, groups: Sequence[ProcessGroup | None]
) -> list[int]:
    """Return the largest of each value over all ranks."""
    if not groups:
        return values
    import torch
    import torch.distributed as dist

    largest = torch.tensor(values, device=device)
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()
