"""Check engines whose ranks may split each sequence: wherever a row is cut, results are
those of whole sequences. Any other engine passes with whole ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.testing import expect, losses
from coupler.testing.cases import LENGTHS, make_batch, weighted
from coupler.testing.conformance.test_engine import (
    LOGPROBS,
    LONGEST,
    SURROGATE,
    Worlds,
    assert_gradient,
    assert_metrics,
    split,
)
from coupler.testing.ranks import World
from coupler.testing.reference import Reference, ToyReference
from coupler.testing.subject import Subject

# Among them are multiples of 2 and 4, and every remainder.
EVERY_CUT = (2, 3, 4, 5, 6, 7, 8, 9)


def share(subject: Subject, tokens: int) -> int:
    """Return the limit under which the ranks of a sequence hold so many tokens."""
    return -(-tokens // subject.config().ranks_per_sequence)


def dense(reference: Reference, lengths: tuple[int, ...]) -> Batch:
    """Make a batch that trains on every token but the first of each sequence, so that
    no cut falls beside what is trained.
    """
    batch = make_batch(reference, lengths)
    mask = np.ones(batch.num_tokens, bool)
    mask[batch.starts[:-1]] = False

    drawn = np.random.default_rng(8).normal(0, 1, batch.num_tokens)
    batch = batch.with_tokens(
        loss_mask=mask,
        advantages=(mask * drawn).astype(np.float32),
    )
    near = reference.outputs(batch)["logprobs"] + 0.25 * drawn
    return batch.with_tokens(
        rollout_logprobs=np.where(mask, near, 0).astype(np.float32),
    )


@pytest.mark.parametrize("num_shards", [1, 2])
def test_ranks_read_the_shards_that_their_configuration_says(
    worlds: Worlds, engine_subject: Subject, num_shards: int
) -> None:
    """A plan counts data shards before any rank is there."""
    layout = worlds(num_shards, max_tokens_per_gpu=share(engine_subject, LONGEST)).layout
    ranks = engine_subject.ranks_for(num_shards)
    want = ranks // engine_subject.config().ranks_per_shard
    expect.same(layout.num_shards, want, f"the data shards of {ranks} ranks")


def test_log_probs_wherever_a_row_is_cut(
    worlds: Worlds, engine_subject: Subject, reference: Reference, every_model: None
) -> None:
    """One sequence at a time: its last token in a part has the first one of the next
    part as its target.
    """
    world = worlds(1, max_tokens_per_gpu=share(engine_subject, LONGEST))
    batch = dense(reference, EVERY_CUT)
    names = ("logprobs", "entropy")

    for i, length in enumerate(EVERY_CUT):
        one = batch.take([i])
        want = reference.outputs(one)
        (done,) = world.forward([one], names)
        for name in names:
            what = f"{name} of a sequence of {length} tokens"
            np.testing.assert_allclose(
                done[name],
                want[name],
                atol=LOGPROBS,
                rtol=1e-4,
                err_msg=what,
            )


@pytest.mark.parametrize("num_shards", [1, 2])
def test_gradient_wherever_a_row_is_cut(
    worlds: Worlds, engine_subject: Subject, reference: Reference, num_shards: int
) -> None:
    """The parts add up, and so do metrics, of which each token counts once."""
    world = worlds(num_shards, max_tokens_per_gpu=share(engine_subject, LONGEST))
    batch = weighted(dense(reference, EVERY_CUT))
    grads, metrics, steps = world.gradient(split(batch, world), SURROGATE)
    want = reference.gradient(batch, losses.surrogate)
    assert_gradient(grads, want)
    assert_metrics(metrics, want.metrics)

    expect.holds(
        all(step == steps[0] for step in steps),
        "one step on every rank",
        steps,
    )
    expect.near(
        steps[0][1],
        want.norm,
        "the norm of the gradient",
        rel=1e-4,
    )


def test_a_sequence_as_long_as_its_ranks_hold_together_trains(
    worlds: Worlds, engine_subject: Subject, reference: Reference
) -> None:
    """Each rank has room for a share of the longest sequence, and no more."""
    world = worlds(1, max_tokens_per_gpu=share(engine_subject, LONGEST))
    batch = weighted(make_batch(reference, LENGTHS))
    grads, metrics, _ = world.gradient([batch], SURROGATE)
    want = reference.gradient(batch, losses.surrogate)
    assert_gradient(grads, want)
    assert_metrics(metrics, want.metrics)


def test_a_sequence_that_its_ranks_do_not_hold_is_refused(
    fresh: Callable[..., World], engine_subject: Subject, reference: Reference
) -> None:
    """The message names the option that would make room."""
    room = share(engine_subject, LONGEST) - 1
    config = engine_subject.config(max_tokens_per_gpu=room)
    option, limit = config.micro_batch_limit
    if not limit:
        pytest.skip(f"{engine_subject} has no limit")

    world = fresh(reference.folder, max_tokens_per_gpu=limit)
    too_long = weighted(make_batch(reference, (LONGEST + 1, LONGEST + 1)))
    with pytest.raises(CouplerError) as refused:
        world.gradient([too_long], SURROGATE)

    expect.holds(
        option in str(refused.value),
        f"a refusal that names {option}",
        refused.value,
    )


def test_a_loss_sees_whole_sequences(
    worlds: Worlds, engine_subject: Subject, reference: Reference
) -> None:
    """A ratio of whole sequences mixes tokens of all parts, so that each part needs the
    log-probs of the others, and gets its own gradient only.
    """
    if isinstance(reference, ToyReference):
        pytest.skip("the toy reference takes losses of one token at a time")
    batch = weighted(dense(reference, EVERY_CUT))
    want = reference.gradient(batch, losses.sequence_ratio)

    # Smaller parts, then several sequences in a part.
    for tokens in (LONGEST, 3 * LONGEST):
        world = worlds(1, max_tokens_per_gpu=share(engine_subject, tokens))
        grads, metrics, _ = world.gradient(
            [batch],
            "coupler.testing.losses:sequence_ratio",
            ("logprobs",),
        )
        assert_gradient(grads, want)
        assert_metrics(metrics, want.metrics)
