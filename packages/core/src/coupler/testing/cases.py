"""Make batches for the kit: ragged, with masked gaps, several temperatures and every
column that core writes.
"""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler.interfaces import Aggregation
from coupler.loop.loss_weight import loss_weight
from coupler.testing.models import NUM_SPECIAL, VOCAB
from coupler.testing.reference import Reference

LENGTHS = (14, 8, 11, 9, 13, 8, 12, 10)  # no two fit into 14 tokens
RAGGED = (1, 2, 14, 3, 1, 9, 7, 2)


def make_batch(reference: Reference, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Batch:
    """Make two groups of completions of one prompt each, with rewards and the log-probs
    of a policy close to the reference.

    Args:
        lengths: [B], an even number; a sequence of length 1 has nothing to train on.
    """
    random = np.random.default_rng(seed)
    rows, total = len(lengths), sum(lengths)
    within = np.concatenate([np.arange(n) for n in lengths])
    prompt = np.repeat([max(1, min(3, n // 3)) for n in lengths], lengths)
    mask = (within >= prompt) & (within != 7)  # row 7 stands for what a tool returned
    group = np.repeat([0, 1], rows // 2)
    tokens = random.integers(NUM_SPECIAL, VOCAB, total).astype(np.int32)
    prompts = random.integers(NUM_SPECIAL, VOCAB, (2, max(lengths))).astype(np.int32)
    tokens = np.where(within < prompt, prompts[np.repeat(group, lengths), within], tokens)
    batch = Batch(
        np.array(lengths, np.int64),
        {
            "tokens": tokens,
            "loss_mask": mask,
            "version": np.where(mask, 3, -1).astype(np.int32),
        },
        {
            "temperature": np.resize([1.0, 0.7, 1.3], rows).astype(np.float32),
            "reward": random.integers(0, 3, rows).astype(np.float32),
            "group": group,
            "trajectory": np.arange(rows),
            "unit": np.arange(rows),
        },
    )
    near = reference.outputs(batch)["logprobs"] + random.normal(0, 0.25, total)

    return batch.with_tokens(
        rollout_logprobs=np.where(mask, near, 0).astype(np.float32),
        advantages=np.where(mask, random.normal(0, 1, total), 0).astype(np.float32),
    )


def with_returns(batch: Batch, seed: int = 0) -> Batch:
    """Add ``returns`` for a critic to meet."""
    drawn = np.random.default_rng(seed).normal(0, 2, batch.num_tokens)
    return batch.with_tokens(returns=np.where(batch["loss_mask"], drawn, 0).astype(np.float32))


def weighted(batch: Batch, aggregation: Aggregation = Aggregation.TOKEN_MEAN) -> Batch:
    """Add ``loss_weight`` over this batch, the whole mini-batch."""
    return batch.with_tokens(loss_weight=loss_weight(batch, aggregation))


def poisoned(batch: Batch) -> Batch:
    """Put NaN under the mask of every floating token column but ``loss_weight``."""
    mask = batch["loss_mask"]
    columns = {
        name: np.where(mask.reshape(-1, *[1] * (column.ndim - 1)), column, np.nan).astype(
            column.dtype
        )
        for name, column in batch.tokens.items()
        if column.dtype.kind == "f" and name != "loss_weight"
    }
    return batch.with_tokens(**columns)
