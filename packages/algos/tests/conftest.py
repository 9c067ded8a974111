"""Batches and their tensors, as core and an engine make them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from coupler.batch import Batch
from coupler.loop.loss_weight import loss_weight

TOKEN_COLUMNS = ("rollout_logprobs", "old_logprobs", "ref_logprobs")


@pytest.fixture
def pack() -> Callable[..., Batch]:
    """(lengths, reward, group, **columns) -> Batch; the first token of a sequence is
    its prompt.
    """

    def build(
        lengths: list[int], reward: list[float], group: list[int], **columns: np.ndarray
    ) -> Batch:
        sizes = np.array(lengths, np.int64)
        mask = np.ones(sizes.sum(), bool)
        mask[np.cumsum(sizes) - sizes] = False
        seqs = {"reward": np.array(reward, np.float32), "group": np.array(group)}
        tokens = {"tokens": np.zeros(sizes.sum(), np.int32), "loss_mask": mask}
        return Batch(sizes, tokens, seqs).with_tokens(**columns)

    return build


@pytest.fixture
def random_batch(pack) -> Batch:
    """Three groups of ragged sequences: one of length 1, one that is masked throughout,
    and every token column.
    """
    rng = np.random.default_rng(7)
    batch = pack([4, 1, 3, 5, 2, 6, 3], [1.0, 0.0, 0.5, 0.2, 0.2, 0.9, 0.1], [5, 5, 5, 9, 9, 2, 2])
    mask = batch["loss_mask"].copy()
    mask[batch.starts[4] : batch.starts[5]] = False
    drawn = {
        name: -rng.exponential(1.0, batch.num_tokens).astype(np.float32) for name in TOKEN_COLUMNS
    }
    return batch.with_tokens(loss_mask=mask, **drawn)


@pytest.fixture
def columns() -> Callable[[Batch], dict]:
    """Batch -> what an engine hands to a loss."""

    def build(batch: Batch) -> dict:
        everything = {**batch.tokens, **batch.seqs}
        tensors = {name: torch.from_numpy(np.array(column)) for name, column in everything.items()}
        seq = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.lengths))
        return {
            **tensors,
            "seq": seq,
            "cu_seqlens": torch.from_numpy(batch.starts).int(),
            "num_seqs": len(batch),
        }

    return build


@pytest.fixture
def run(columns) -> Callable:
    """(algorithm, batch, logprobs, entropy) -> token loss, its metrics, and the
    gradients of the step's loss.
    """

    def compute(algorithm, batch: Batch, logprobs: np.ndarray, entropy: np.ndarray | None = None):
        inputs = {
            "logprobs": logprobs,
            "entropy": np.ones_like(logprobs) if entropy is None else entropy,
        }
        out = {name: torch.tensor(value, requires_grad=True) for name, value in inputs.items()}
        loss, metrics = algorithm.loss(out, columns(batch))
        weight = torch.from_numpy(loss_weight(batch, algorithm.aggregation, algorithm.constant))
        (loss * weight).sum().backward()
        return loss.detach(), metrics, {name: tensor.grad for name, tensor in out.items()}

    return compute
