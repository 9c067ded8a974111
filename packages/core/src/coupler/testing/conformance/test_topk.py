"""Check engines that declare ``output:topk``: the most likely ids of a position, and
the log-probs of given ids with their gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.testing import expect, losses
from coupler.testing.cases import LENGTHS, RAGGED, make_batch, weighted
from coupler.testing.conformance.test_engine import (
    LOGPROBS,
    LONGEST,
    assert_gradient,
    split,
)
from coupler.testing.models import VOCAB
from coupler.testing.ranks import World
from coupler.testing.reference import Reference
from coupler.testing.subject import Subject

K = 6  # ids of a row

Worlds = Callable[..., World]


@pytest.fixture
def made(engine_subject: Subject, reference: Reference) -> Callable[..., Batch]:
    """Return what makes a batch, if the engine computes log-probs of several ids."""
    if not engine_subject.has("output:topk"):
        pytest.skip(f"{engine_subject} does not declare output:topk")
    return lambda lengths=LENGTHS: weighted(make_batch(reference, lengths))


def likely(reference: Reference, batch: Batch) -> np.ndarray:
    """Return [T, K] the highest log-probs of each token, 0 outside ``loss_mask``."""
    rows = [reference.distributions(batch.take([i])) for i in range(len(batch))]
    highest = -np.sort(-np.concatenate(rows), 1)[:, :K]
    return np.where(batch["loss_mask"][:, None], highest, 0)


def with_ids(batch: Batch) -> Batch:
    """Name K different random ids for each token, the token itself in some rows."""
    random = np.random.default_rng(3)
    ids = np.stack([random.permutation(VOCAB)[:K] for _ in range(batch.num_tokens)])
    elsewhere = (ids != batch["tokens"][:, None]).all(1)
    ids[::2, 1] = np.where(elsewhere, batch["tokens"], ids[:, 1])[::2]
    return batch.with_tokens(top_ids=ids.astype(np.int32))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_topk_logprobs_equal_the_references(
    worlds: Worlds,
    reference: Reference,
    engine_subject: Subject,
    made: Callable[..., Batch],
    num_shards: int,
) -> None:
    """The log-probs fall along a row, and are those of the ids beside them."""
    want = ("logprobs", ("top_ids", K), "top_logprobs")
    world = worlds(num_shards, max_tokens_per_gpu=2 * LONGEST)
    for lengths in (LENGTHS, RAGGED):
        batch = made(lengths)
        for shard, done in zip(
            shards := split(batch, world), world.forward(shards, want), strict=True
        ):
            mask, ids, found = shard["loss_mask"], done["top_ids"], done["top_logprobs"]
            np.testing.assert_allclose(found, likely(reference, shard), atol=LOGPROBS, rtol=1e-4)
            expect.same((ids.dtype.kind, ids.shape), ("i", found.shape), "top_ids")
            assert not ids[~mask].any(), "ids outside the mask are 0"

            mine = shard.with_tokens(top_ids=ids)
            at_ids = reference.outputs(mine)["top_logprobs"]
            np.testing.assert_allclose(found, at_ids, atol=LOGPROBS, rtol=1e-4)
            plain = reference.outputs(shard)["logprobs"]
            np.testing.assert_allclose(done["logprobs"], plain, atol=LOGPROBS, rtol=1e-4)


def test_the_most_likely_ids_come_alone_too(worlds: Worlds, made: Callable[..., Batch]) -> None:
    batch, world = made(), worlds(1, max_tokens_per_gpu=2 * LONGEST)
    alone = world.forward([batch], (("top_ids", K),))[0]["top_ids"]
    beside = world.forward([batch], (("top_ids", K), "top_logprobs"))[0]["top_ids"]
    expect.same(alone.tolist(), beside.tolist(), "the most likely ids, without their log-probs,")


def test_more_ids_than_there_are_end_in_none(
    worlds: Worlds, reference: Reference, made: Callable[..., Batch]
) -> None:
    """A row has every id once, and the probability of -1 is 0."""
    batch, world = made(), worlds(1, max_tokens_per_gpu=2 * LONGEST)
    size = reference.distributions(batch.take([0])).shape[1]
    done = world.forward([batch], (("top_ids", size + 2), "top_logprobs"))[0]
    mask = batch["loss_mask"]
    rows, found = done["top_ids"][mask], done["top_logprobs"][mask]
    expect.same(np.unique(rows[:, size:]).tolist(), [-1], "the ids behind the last one")
    assert (np.sort(rows[:, :size], 1) == np.arange(size)).all(), "each id is there once"
    total = np.exp(found.astype(np.float64)).sum(1)
    np.testing.assert_allclose(total, 1, atol=1e-4)
    assert not np.exp(found[:, size:]).any(), "an id of -1 has no probability"


@pytest.mark.parametrize("num_shards", [1, 2])
def test_logprobs_of_given_ids_have_their_gradient(
    worlds: Worlds, reference: Reference, made: Callable[..., Batch], num_shards: int
) -> None:
    """The loss reads them beside the log-prob of the token, over micro-batches."""
    batch = with_ids(made())
    world = worlds(num_shards, max_tokens_per_gpu=LONGEST)
    shards = split(batch, world)
    for shard, done in zip(shards, world.forward(shards, ("top_logprobs",)), strict=True):
        want = reference.outputs(shard)["top_logprobs"]
        np.testing.assert_allclose(done["top_logprobs"], want, atol=LOGPROBS, rtol=1e-4)
    grads, _, _ = world.gradient(
        shards, "coupler.testing.losses:among", ("top_logprobs", "logprobs")
    )
    assert_gradient(grads, reference.gradient(batch, losses.among))
