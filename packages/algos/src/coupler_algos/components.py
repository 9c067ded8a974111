"""Give each kind of row its own parts of the loss, on the controller, in NumPy.

A part has a token column of coefficients, those that ``algorithm.sources`` states for
the row's ``data_source``. Core normalises each column over its own tokens
(``Algorithm.components``), so that rows without a part do not dilute it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import DEMONSTRATION
from coupler.errors import CouplerError
from coupler_algos.config import GroupConfig
from coupler_algos.teaching import taught, without_rewards

NAMES: Final = ("rl", "ce", "ref", "teacher", "demo", "gkd")
TAUGHT: Final = "advantages_of_teacher"
"""The token column of advantages that the part ``teacher`` reads."""


def column_of(name: str) -> str:
    """Return the token column with the coefficients of a part."""
    return f"component_{name}"


def columns_of(config: GroupConfig) -> tuple[str, ...]:
    """Return the columns of the parts that a source has."""
    return tuple(column_of(name) for name in NAMES if config.has_component(name))


def coefficients(config: GroupConfig, batch: Batch, name: str) -> np.ndarray:
    """Return [B] the coefficient of a part in each row.

    Raises:
        CouplerError: a row is of a source that ``algorithm.sources`` does not name.
    """
    found = batch["data_source"].tolist()
    unknown = sorted(source for source in {*found} if not config.parts_of(source))
    if unknown:
        raise CouplerError(
            f"a row has data_source={unknown[0]!r}, which algorithm.sources does not name.\n"
            f"  it names:  {', '.join(sorted(config.sources))}"
        )

    return np.array(
        [config.parts_of(source).get(name, 0.0) for source in found],
        np.float64,
    )


def demonstrated(batch: Batch) -> np.ndarray:
    """Return [B] true where the completion is the answer of the row."""
    if batch.has(DEMONSTRATION):
        return batch[DEMONSTRATION]
    return np.zeros(len(batch), bool)


def split(config: GroupConfig, batch: Batch, estimate: Callable[[Batch], Batch]) -> Batch:
    """Add ``advantages`` [T] float32 and the columns of each part.

    Advantages of rewards are estimated over the samples with ``rl`` alone, and are 0 in
    others. A sample has ``ce`` where its reward is above ``ce_above``: rejection
    sampling, as in RAFT (arXiv 2304.06767). Answers of the rows have ``demo`` alone,
    and ``gkd`` as samples have it.

    Args:
        estimate: adds ``advantages`` to the rows that it is given.

    Raises:
        CouplerError: a row is of an unknown source, or samples cannot be compared.
    """
    columns: dict[str, np.ndarray] = {}
    for name in NAMES:
        if config.has_component(name):
            columns[column_of(name)] = _per_token(
                config,
                batch,
                name,
            )

    if config.has_component("teacher"):
        alone = replace(config, teacher_coef=1.0)
        advised = taught(alone, without_rewards(batch))
        columns[TAUGHT] = advised["advantages"]

    rewarded = (coefficients(config, batch, "rl") > 0) & ~demonstrated(batch)
    columns["advantages"] = np.zeros(batch.num_tokens, np.float32)
    if rewarded.any():
        part = estimate(batch.take(np.flatnonzero(rewarded)))
        mine = batch.spread(rewarded)
        columns["advantages"][mine] = part["advantages"]
    return batch.with_tokens(**columns)


def _per_token(config: GroupConfig, batch: Batch, name: str) -> np.ndarray:
    """Return [T] float32 the coefficients of a part; 0 outside ``loss_mask``."""
    of_row = coefficients(config, batch, name)
    if name != "gkd":
        mine = demonstrated(batch) == (name == "demo")
        of_row = np.where(mine, of_row, 0)
    if name == "ce":
        good = batch["reward"] > config.ce_above
        of_row = np.where(good, of_row, 0)

    per_token = np.where(
        batch["loss_mask"],
        batch.spread(of_row),
        0,
    )
    return per_token.astype(np.float32)
