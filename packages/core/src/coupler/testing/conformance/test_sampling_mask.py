"""Check engines that declare ``input:sampling_mask``: log-probs, entropies and
gradients are of the distribution over the ids that each token was sampled among.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.testing import losses
from coupler.testing.cases import LENGTHS, RAGGED, make_batch, weighted
from coupler.testing.conformance.test_engine import (
    LOGPROBS,
    LONGEST,
    SURROGATE,
    assert_gradient,
    split,
)
from coupler.testing.models import VOCAB
from coupler.testing.ranks import World
from coupler.testing.reference import Reference
from coupler.testing.subject import Subject

WIDTH = 7  # ids of a row, at most

Worlds = Callable[..., World]


@pytest.fixture
def masked(engine_subject: Subject, reference: Reference) -> Callable[..., Batch]:
    """Return what makes a batch with a mask, sampled by a policy close to the
    reference, if the engine obeys masks.
    """
    if not engine_subject.has("input:sampling_mask"):
        pytest.skip(f"{engine_subject} does not declare input:sampling_mask")

    def make(lengths: tuple[int, ...] = LENGTHS) -> Batch:
        batch = with_mask(make_batch(reference, lengths))
        near = reference.outputs(batch)["logprobs"]
        near += np.random.default_rng(6).normal(0, 0.25, batch.num_tokens)
        near = np.where(batch["loss_mask"], near, 0).astype(np.float32)
        return weighted(batch.with_tokens(rollout_logprobs=near))

    return make


def with_mask(batch: Batch) -> Batch:
    """Keep 1 to ``WIDTH`` random ids and the sampled one, in any order, and all ids of
    some tokens. Rows of tokens that are not trained hold anything.
    """
    random = np.random.default_rng(5)
    mask = np.full((batch.num_tokens, WIDTH), -1, np.int32)

    for t, token in enumerate(batch["tokens"]):
        others = random.integers(0, VOCAB, random.integers(WIDTH))
        kept = np.arange(3)
        if batch["loss_mask"][t]:
            kept = np.unique([token, *others])
        mask[t, : len(kept)] = random.permutation(kept)

    mask[::5] = -1
    return batch.with_tokens(sampling_mask=mask)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_logprobs_and_entropy_are_over_the_mask(
    worlds: Worlds,
    reference: Reference,
    engine_subject: Subject,
    masked: Callable[..., Batch],
    num_shards: int,
) -> None:
    names = ["logprobs", "entropy"]
    if engine_subject.has("output:sum_pi_squared"):
        names.append("sum_pi_squared")
    world = worlds(num_shards, max_tokens_per_gpu=LONGEST)

    shards = split(masked(RAGGED), world)
    for shard, done in zip(shards, world.forward(shards, tuple(names)), strict=True):
        want = reference.outputs(shard)
        for name in names:
            np.testing.assert_allclose(
                done[name], want[name], atol=LOGPROBS, rtol=1e-4, err_msg=name
            )


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_gradient_is_over_the_mask(
    worlds: Worlds, reference: Reference, masked: Callable[..., Batch], num_shards: int
) -> None:
    """Tokens beside the mask get none through the head. Several micro-batches sum."""
    world = worlds(num_shards, max_tokens_per_gpu=2 * LONGEST)
    batch = masked()
    grads, _, _ = world.gradient(split(batch, world), SURROGATE)
    assert_gradient(grads, reference.gradient(batch, losses.surrogate))


def test_the_gradient_of_squares_is_over_the_mask(
    worlds: Worlds,
    reference: Reference,
    engine_subject: Subject,
    masked: Callable[..., Batch],
) -> None:
    if not engine_subject.has("output:sum_pi_squared"):
        pytest.skip(f"{engine_subject} does not declare output:sum_pi_squared")

    batch = masked()
    want = ("logprobs", "entropy", "sum_pi_squared")
    grads, _, _ = worlds(1).gradient([batch], "coupler.testing.losses:squares", want)
    assert_gradient(grads, reference.gradient(batch, losses.squares))


def test_rows_without_ids_are_over_all(worlds: Worlds, masked: Callable[..., Batch]) -> None:
    world, batch = worlds(1), masked().without("sampling_mask")
    without = np.full((batch.num_tokens, WIDTH), -1, np.int32)
    plain, whole = (
        world.forward([b], ("logprobs", "entropy"))[0]
        for b in (batch, batch.with_tokens(sampling_mask=without))
    )
    for name in ("logprobs", "entropy"):
        np.testing.assert_array_equal(whole[name], plain[name], err_msg=name)
