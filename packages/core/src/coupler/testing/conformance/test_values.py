"""Check engines that declare ``output:values``: a number per state, its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.interfaces import Head, Part
from coupler.testing import expect, losses
from coupler.testing.cases import LENGTHS, RAGGED, make_batch, poisoned, weighted, with_returns
from coupler.testing.conformance.conftest import running
from coupler.testing.conformance.test_engine import LONGEST, assert_gradient, assert_metrics, split
from coupler.testing.ranks import World
from coupler.testing.reference import Reference, TransformersValueReference
from coupler.testing.subject import Subject

VALUES = ("values",)
ERROR = "coupler.testing.losses:value_error"

Worlds = Callable[..., World]


@pytest.fixture(scope="module")
def critic(
    engine_subject: Subject, model_name: str, value_reference_of: Callable[[str], Reference]
) -> Reference:
    if not engine_subject.has("output:values"):
        pytest.skip(f"{engine_subject} does not declare output:values")
    return value_reference_of(model_name)


@pytest.fixture(scope="module")
def batches(reference: Reference) -> Callable[..., Batch]:
    """Make batches of the kit with returns, at several temperatures, which no value
    depends on.
    """
    return lambda *args: with_returns(make_batch(reference, *args))


@pytest.fixture(scope="module")
def critics(
    tmp_path_factory: pytest.TempPathFactory, engine_subject: Subject, critic: Reference
) -> Iterator[Worlds]:
    """Start worlds as ``worlds`` does, with a value head."""
    recipe = partial(engine_subject.recipe, critic.folder, Head.VALUE)
    with running(engine_subject, recipe, tmp_path_factory) as make:
        yield make


def expected(critic: Reference) -> dict[str, np.ndarray]:
    """Return the tensors of a critic: the checkpoint's without the head of the language
    model.
    """
    return {
        name: w for name, w in critic.tensors.items() if not name.startswith(("lm_head.", "head."))
    }


def test_values_equal_the_reference(
    critics: Worlds, critic: Reference, batches: Callable[..., Batch], every_model: None
) -> None:
    """Row t is the value before token t is sampled, from the token before it. It is
    zero where nothing is trained.
    """
    for lengths in (LENGTHS, RAGGED):
        batch = batches(lengths)
        got = critics(1, max_tokens_per_gpu=2 * LONGEST).forward([batch], VALUES)[0]["values"]
        expect.same(got.dtype, np.dtype(np.float32), "the dtype of values")
        np.testing.assert_allclose(got, critic.outputs(batch)["values"], atol=1e-4, rtol=1e-4)
        assert not got[~batch["loss_mask"]].any(), "values are not 0 under the mask"


@pytest.mark.parametrize("num_shards", [2, 4])
def test_values_on_several_shards(
    critics: Worlds, critic: Reference, batches: Callable[..., Batch], num_shards: int
) -> None:
    world = critics(num_shards, max_tokens_per_gpu=LONGEST)
    shards = split(batches(RAGGED), world, first=[])
    for shard, done in zip(shards, world.forward(shards, VALUES), strict=True):
        want = critic.outputs(shard)["values"] if len(shard) else []
        np.testing.assert_allclose(done["values"], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sequences", [1, 4, 8])
def test_gradient_over_micro_batches(
    critics: Worlds,
    critic: Reference,
    batches: Callable[..., Batch],
    every_model: None,
    sequences: int,
) -> None:
    batch = weighted(batches())
    grads, metrics, steps = critics(1, max_tokens_per_gpu=sequences * LONGEST).gradient(
        [batch], ERROR, VALUES
    )
    want = critic.gradient(batch, losses.value_error)
    assert_gradient(grads, want)
    assert_metrics(metrics, want.metrics)

    expect.near(steps[0][1], want.norm, "the norm of the gradient", rel=1e-4)


@pytest.mark.parametrize("first", [None, []], ids=["even", "empty-rank"])
@pytest.mark.parametrize("num_shards", [2, 4])
def test_gradient_over_shards(
    critics: Worlds,
    critic: Reference,
    batches: Callable[..., Batch],
    num_shards: int,
    first: list[int] | None,
) -> None:
    world = critics(num_shards, max_tokens_per_gpu=LONGEST)
    batch = weighted(batches())
    grads, metrics, steps = world.gradient(split(batch, world, first), ERROR, VALUES)
    want = critic.gradient(batch, losses.value_error)
    assert_gradient(grads, want)
    assert_metrics(metrics, want.metrics)

    assert all(step == steps[0] for step in steps), "ranks disagree about the step"


def test_gradient_of_the_score_equals_its_formula(
    critics: Worlds, critic: Reference, batches: Callable[..., Batch]
) -> None:
    """The gradient of ``f (v - G)^2 / 2`` is dW = sum_t w_t f (v_t - G_t) h_t, and db
    the same without h, without automatic differentiation.
    """
    if not isinstance(critic, TransformersValueReference):
        pytest.skip("the toy reference is such a formula throughout")
    batch = weighted(batches())
    d_weight, d_bias = np.zeros(critic.tensors["score.weight"].shape), 0.0

    for i in range(len(batch)):
        one = batch.take([i])
        hidden = critic.hidden(one)
        values = hidden @ critic.tensors["score.weight"][0] + critic.tensors["score.bias"][0]
        slope = one["loss_weight"] * (1 + 0.5 * one["reward"][0]) * (values - one["returns"])
        d_weight[0] += slope @ hidden
        d_bias += slope.sum()

    grads, _, _ = critics(1).gradient([batch], ERROR, VALUES)
    off = float(np.abs(grads["score.weight"] - d_weight).max())
    expect.below(
        off,
        critic.tolerance * np.abs(d_weight).max(),
        "the difference of score.weight from its formula",
    )
    expect.near(float(grads["score.bias"][0]), d_bias, "the gradient of score.bias", rel=1e-4)


def test_what_stands_under_the_mask_changes_nothing(
    critics: Worlds, batches: Callable[..., Batch]
) -> None:
    batch = weighted(batches())
    world = critics(1, max_tokens_per_gpu=2 * LONGEST)
    clean, _, _ = world.gradient([batch], ERROR, VALUES)
    dirty, _, steps = world.gradient([poisoned(batch)], ERROR, VALUES)
    assert steps[0][0], "NaN under the mask made the step non-finite"
    for name, grad in clean.items():
        np.testing.assert_array_equal(dirty[name], grad, err_msg=name)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_weights_are_the_checkpoint_with_the_score(
    critics: Worlds, critic: Reference, num_shards: int
) -> None:
    """An export writes every tensor of the backbone and the score, and no head of a
    language model.
    """
    got, want = critics(num_shards, max_tokens_per_gpu=LONGEST).weights(), expected(critic)
    expect.same(
        {n: w.shape for n, w in got.items()},
        {n: w.shape for n, w in want.items()},
        "the shapes of weights()",
    )
    for name, tensor in want.items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)


def test_without_a_score_in_the_checkpoint_values_start_at_zero(
    fresh: Callable[..., World],
    critic: Reference,
    reference: Reference,
    batches: Callable[..., Batch],
    every_model: None,
) -> None:
    """The score is there from the start, and the first step moves it."""
    world = fresh(reference.folder, head=Head.VALUE)
    batch = weighted(batches())
    expect.zero(world.forward([batch], VALUES)[0].select("values").tokens, "before the first step")
    before = world.weights()
    expect.same(
        before.keys() ^ expected(critic).keys(), set(), "the names that weights() lacks or adds"
    )

    expect.zero(
        {name: before[name] for name in ("score.weight", "score.bias")}, "before the first step"
    )
    world.gradient([batch], ERROR, VALUES)
    expect.moves(
        world.forward([batch], VALUES)[0].select("values").tokens, "values that the step moved"
    )


def test_a_score_is_a_value_without_a_bias(
    fresh: Callable[..., World],
    critic: Reference,
    reference: Reference,
    batches: Callable[..., Batch],
    every_model: None,
) -> None:
    """``Head.SCORE`` is what AutoModelForSequenceClassification has. Its gradient is
    that of ``Head.VALUE`` where both start at zero.
    """
    score, value = (fresh(reference.folder, head=head) for head in (Head.SCORE, Head.VALUE))
    names = expected(critic).keys() - {"score.bias"}
    expect.same(score.weights().keys() ^ names, set(), "the names that weights() lacks or adds")

    batch = weighted(batches())
    got, want = (world.gradient([batch], ERROR, VALUES)[0] for world in (score, value))
    expect.same(got.keys() ^ names, set(), "the names that gradients() lacks or adds")
    scale = float(np.abs(want["score.weight"]).max())
    off = float(np.abs(got["score.weight"] - want["score.weight"]).max())
    expect.below(off, critic.tolerance * scale, "the difference of the gradient of score.weight")
    after = score.forward([batch], VALUES)[0]
    expect.moves(
        after.select("values").tokens,
        "values that the step moved",
    )


def test_a_saved_critic_continues_as_if_nothing_had_happened(
    fresh: Callable[..., World], critic: Reference, batches: Callable[..., Batch], tmp_path: Path
) -> None:
    batch = weighted(batches())
    world, resumed = (fresh(critic.folder, head=Head.VALUE, deterministic=True) for _ in range(2))
    world.gradient([batch], ERROR, VALUES)
    world.save(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    resumed.load(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    for each in (world, resumed):
        each.gradient([batch], ERROR, VALUES, index=1)
    want, got = world.weights(), resumed.weights()
    for name, w in want.items():
        np.testing.assert_array_equal(got[name], w, err_msg=name)
