"""Check engines that declare ``output:routed_experts``: they tell where tokens go, and
send them there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.testing import expect, losses
from coupler.testing.cases import LENGTHS, RAGGED, make_batch, weighted
from coupler.testing.conformance.conftest import running
from coupler.testing.conformance.test_engine import LONGEST, SURROGATE, assert_gradient, split
from coupler.testing.ranks import World
from coupler.testing.reference import Reference, TransformersReference
from coupler.testing.subject import Subject

BOTH = ("logprobs", "routed_experts")

Worlds = Callable[..., World]


@pytest.fixture(scope="module")
def moe(engine_subject: Subject, reference_of: Callable[[str], Reference]) -> TransformersReference:
    if not engine_subject.has("output:routed_experts") or "moe" not in engine_subject.models:
        pytest.skip(
            f"{engine_subject} does not declare output:routed_experts, or runs no model with "
            "experts here"
        )
    found = reference_of("moe")
    assert isinstance(found, TransformersReference), (
        f"expected a model of transformers, came {found}"
    )
    return found


@pytest.fixture(scope="module")
def routed(
    tmp_path_factory: pytest.TempPathFactory, engine_subject: Subject, moe: TransformersReference
) -> Iterator[Worlds]:
    """Start worlds as ``worlds`` does, with experts."""
    with running(
        engine_subject, partial(engine_subject.recipe, moe.folder), tmp_path_factory
    ) as make:
        yield make


def disturbed(batch: Batch, moe: TransformersReference) -> Batch:
    """Send every token to other experts than the router would choose, but for some that
    are left to it.
    """
    column = (moe.routes(batch) + 1) % moe.model.config.num_experts
    column[::5] = -1
    return batch.with_tokens(routed_experts=column.astype(np.int16))


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_routes_equal_the_reference(
    routed: Worlds, moe: TransformersReference, num_shards: int
) -> None:
    """Every token has its routes, prompts and last ones too, on whichever rank it was.
    One shard may have none.
    """
    world = routed(num_shards, max_tokens_per_gpu=LONGEST)
    shards = split(make_batch(moe, RAGGED), world, first=[])
    for shard, done in zip(shards, world.forward(shards, BOTH), strict=True):
        got = done["routed_experts"]
        expect.holds(
            got.dtype.kind in "iu" and len(got) == shard.num_tokens,
            f"a row of integers for each of {shard.num_tokens} tokens",
            (got.dtype, len(got)),
        )
        if len(shard):
            np.testing.assert_array_equal(np.sort(got, 2), np.sort(moe.routes(shard), 2))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_replaying_its_own_routes_gives_equal_bits(
    routed: Worlds, moe: TransformersReference, num_shards: int
) -> None:
    world = routed(num_shards, max_tokens_per_gpu=2 * LONGEST)
    shards = split(make_batch(moe), world)
    done = world.forward(shards, BOTH)
    known = [
        s.with_tokens(routed_experts=d["routed_experts"]) for s, d in zip(shards, done, strict=True)
    ]

    for first, again in zip(done, world.forward(known, BOTH), strict=True):
        for name in BOTH:
            np.testing.assert_array_equal(again[name], first[name], err_msg=name)


def test_what_was_never_fed_is_left_to_the_router(
    routed: Worlds, moe: TransformersReference
) -> None:
    batch, world = make_batch(moe), routed(1)
    config = moe.model.config
    unknown = np.full(
        (batch.num_tokens, config.num_hidden_layers, config.num_experts_per_tok), -1, np.int8
    )
    plain, replayed = (
        world.forward([b], BOTH)[0] for b in (batch, batch.with_tokens(routed_experts=unknown))
    )
    for name in BOTH:
        np.testing.assert_array_equal(replayed[name], plain[name], err_msg=name)


def test_replayed_logprobs_equal_the_reference(routed: Worlds, moe: TransformersReference) -> None:
    batch = make_batch(moe)
    plain, other = moe.outputs(batch)["logprobs"], disturbed(batch, moe)
    want = moe.outputs(other)["logprobs"]
    assert np.abs(want - plain).max() > 1e-2, "this test must change something"
    done = routed(1, max_tokens_per_gpu=2 * LONGEST).forward([other], BOTH)[0]
    np.testing.assert_allclose(done["logprobs"], want, atol=5e-5, rtol=1e-4)
    fed = other["routed_experts"][:, 0, 0] >= 0
    np.testing.assert_array_equal(done["routed_experts"][fed], other["routed_experts"][fed])


@pytest.mark.parametrize("sequences", [1, len(LENGTHS)], ids=["one-a-micro-batch", "all-at-once"])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_replayed_routes_leave_the_router_its_gradient(
    routed: Worlds, moe: TransformersReference, num_shards: int, sequences: int
) -> None:
    """Weights are of the current scores, also where the backward pass computes them
    again.
    """
    batch = weighted(disturbed(make_batch(moe), moe))
    world = routed(num_shards, max_tokens_per_gpu=sequences * LONGEST)
    grads, _, steps = world.gradient(split(batch, world), SURROGATE)
    want = moe.gradient(batch, losses.surrogate)
    assert_gradient(grads, want)
    expect.near(steps[0][1], want.norm, "the norm of the gradient", rel=1e-4)
    routers = [name for name in grads if name.endswith("mlp.gate.weight")]
    expect.same(len(routers), moe.model.config.num_hidden_layers, "the number of routers")
    expect.moves({name: grads[name] for name in routers}, "a gradient of every router")


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda column: column[:, :1], "expected integers"),
        (lambda column: column * 0, "twice"),
        (lambda column: column + 100, "names expert"),
        (lambda column: column.astype(np.float32), "expected integers"),
    ],
    ids=["too-few-layers", "twice-the-same", "no-such-expert", "no-integers"],
)
def test_routes_that_cannot_be_are_refused(
    fresh: Callable[..., World],
    moe: TransformersReference,
    any_setting: None,
    spoil: Callable[[np.ndarray], np.ndarray],
    what: str,
) -> None:
    batch = make_batch(moe)
    bad = batch.with_tokens(routed_experts=spoil(moe.routes(batch)))
    with pytest.raises(CouplerError, match=what):
        fresh(moe.folder).forward([bad], BOTH)
