"""Add the columns of engines to a step's batch, part by part while it is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import PART
from coupler.config.schema import RunConfig
from coupler.conversation.packing import joined
from coupler.errors import CouplerError
from coupler.interfaces import Algorithm
from coupler.loop.turns import OLD_LOGPROBS, takes_one_step

# computes token columns, by their names
Provider = Callable[[Batch], Awaitable[Mapping[str, np.ndarray]]]


class Completing:
    """Completes parts of a batch in their order, one at a time.

    Ranks see the calls in one order so. No number depends on which part was waited for.
    """

    def __init__(self, complete: Callable[[Batch], Awaitable[Batch]]) -> None:
        self.complete = complete
        self.parts: list[asyncio.Task[Batch]] = []
        self.order = asyncio.Lock()

    def begin(self, part: Batch) -> None:
        """Complete ``part`` after those before it, beside the caller.

        It gets the column ``part``, for a replay of the same passes.
        """
        number = np.full(len(part), len(self.parts), np.int32)
        part = part.with_seqs(**{PART: number})
        self.parts.append(asyncio.create_task(self._one(part)))

    async def _one(self, part: Batch) -> Batch:
        async with self.order:
            return await self.complete(part)

    async def whole(self) -> Batch:
        """Wait for all parts, and return them as one batch."""
        return joined(await asyncio.gather(*self.parts))

    async def close(self) -> None:
        """End the parts that are still waited for."""
        for part in self.parts:
            part.cancel()
        await asyncio.gather(*self.parts, return_exceptions=True)


async def complete(
    batch: Batch, config: RunConfig, algorithm: Algorithm, providers: Mapping[str, Provider]
) -> Batch:
    """Add the columns that the algorithm needs, from all roles side by side.

    With one optimizer step a batch, ``old_logprobs`` cost a forward pass and tell the
    loss nothing new, so only an algorithm that has them in ``always`` gets them.

    Raises:
        CouplerError: a column is not finite at a sampled token.
    """
    needs = algorithm.needs
    if takes_one_step(config):
        needs -= {OLD_LOGPROBS} - algorithm.always
    names = sorted(needs & providers.keys())

    found = await asyncio.gather(*(providers[name](batch) for name in names))
    columns = {name: column for provided in found for name, column in provided.items()}

    check_finite(columns, batch["loss_mask"])
    return batch.with_tokens(**columns)


def check_finite(columns: Mapping[str, np.ndarray], mask: np.ndarray) -> None:
    """Refuse NaN and infinity in what engines computed for sampled tokens.

    A loss that clamps ratios would turn them into a gradient of 0, and apply the step.

    Args:
        columns: [T, ...] by name.
        mask: [T] True at sampled tokens. Others are not read.

    Raises:
        CouplerError: a column holds one. The message names the column.
    """
    for name, column in columns.items():
        bad = np.count_nonzero(~np.isfinite(column[mask])) if column.dtype.kind == "f" else 0
        if bad:
            engine = "critic.engine" if name == "values" else "engine"
            raise CouplerError(
                f"the column {name} is not finite at {bad} of {np.count_nonzero(mask)} "
                "sampled tokens, and no step was taken on this batch.\n"
                f"  try:  {engine}.dtype=fp32, or look for a NaN in the weights of the model "
                "that computed it"
            )
