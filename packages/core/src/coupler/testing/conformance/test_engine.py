"""Check what every engine must do. Law 1: the gradient of a step depends on the batch
and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.engine_kit.adamw import AdamWConfig
from coupler.interfaces import Aggregation, Part
from coupler.metrics import Metrics
from coupler.testing import expect, losses
from coupler.testing.cases import LENGTHS, RAGGED, make_batch, poisoned, weighted
from coupler.testing.conformance.conftest import FROZEN
from coupler.testing.ranks import Arrays, World
from coupler.testing.reference import Gradient, Reference, TransformersReference
from coupler.testing.subject import Subject

LOGPROBS = 5e-5  # nats, in float32
LONGEST = max(LENGTHS)
SURROGATE = "coupler.testing.losses:surrogate"

Worlds = Callable[..., World]


def assert_gradient(got: Arrays, want: Gradient) -> None:
    expect.same(got.keys() ^ want.grads.keys(), set(), "the names that gradients() lacks or adds")
    for name, true in want.grads.items():
        assert got[name].shape == true.shape, name
        error, scale = float(np.abs(got[name] - true).max()), float(np.abs(true).max())
        assert error <= want.tolerance * scale, (
            f"{name}: max|dg| = {error:.2e}, max|g| = {scale:.2e}"
        )


def assert_metrics(got: Metrics, want: Metrics) -> None:
    """Compare the metrics of a loss. An engine may add metrics of its own."""
    expect.numbers(
        {n: got[n].value for n in want if n in got},
        {n: m.value for n, m in want.items()},
        "the metrics of the loss",
        rel=1e-4,
    )


def split(batch: Batch, world: World, first: list[int] | None = None) -> list[Batch]:
    """Cut into shards of near-equal size, or ``first`` on the first shard and the rest
    over the others.
    """
    num_shards = world.layout.num_shards
    if first is None or num_shards == 1:
        return [batch.take(rows) for rows in batch.partition(num_shards)]
    rest = np.setdiff1d(np.arange(len(batch)), first)
    others = [rest[part] for part in batch.take(rest).partition(num_shards - 1)]
    return [batch.take(rows) for rows in (first, *others)]


def first_rows_masked(batch: Batch) -> Batch:
    """Mask every token of the first two sequences, as if all their rewards were
    filtered.
    """
    return batch.with_tokens(
        loss_mask=batch["loss_mask"] & (batch.spread(np.arange(len(batch))) > 1)
    )


# --- log-probs


def test_logprobs_and_entropy_equal_the_reference(
    worlds: Worlds, reference: Reference, every_model: None
) -> None:
    """Both are of the sampling distribution, each sequence at its own temperature. Both
    are zero where nothing is trained.
    """
    for lengths in (LENGTHS, RAGGED):
        batch = make_batch(reference, lengths)
        done = worlds(1, max_tokens_per_gpu=2 * LONGEST).forward([batch], ("logprobs", "entropy"))[
            0
        ]
        want = reference.outputs(batch)

        for name in ("logprobs", "entropy"):
            expect.same(done[name].dtype, np.dtype(np.float32), f"the dtype of {name}")
            np.testing.assert_allclose(
                done[name], want[name], atol=LOGPROBS, rtol=1e-4, err_msg=name
            )
            assert not done[name][~batch["loss_mask"]].any(), f"{name} is not 0 under the mask"

        np.testing.assert_array_equal(
            done["tokens"], batch["tokens"], err_msg="forward() changed the order of rows"
        )


def test_logprobs_without_a_temperature_column(worlds: Worlds, reference: Reference) -> None:
    batch = make_batch(reference).with_seqs(temperature=np.ones(len(LENGTHS), np.float32))
    done = worlds(1).forward([batch.select("tokens", "loss_mask")], ("logprobs",))[0]
    np.testing.assert_allclose(
        done["logprobs"], reference.outputs(batch)["logprobs"], atol=LOGPROBS, rtol=1e-4
    )


def test_an_empty_batch_has_no_logprobs(worlds: Worlds, reference: Reference) -> None:
    (done,) = worlds(1).forward([make_batch(reference).take([])], ("logprobs",))
    shape = done["logprobs"].shape
    assert shape == (0,), f"expected no log-probs of an empty batch, came shape {shape}"


@pytest.mark.parametrize("num_shards", [2, 4])
def test_logprobs_on_several_shards(worlds: Worlds, reference: Reference, num_shards: int) -> None:
    """The first shard is empty, the others have different numbers of micro-batches."""
    world = worlds(num_shards, max_tokens_per_gpu=LONGEST)
    shards = split(make_batch(reference, RAGGED), world, first=[])
    for shard, done in zip(shards, world.forward(shards, ("logprobs",)), strict=True):
        want = reference.outputs(shard)["logprobs"] if len(shard) else []
        np.testing.assert_allclose(done["logprobs"], want, atol=LOGPROBS, rtol=1e-4)


# --- the gradient of one step


@pytest.mark.parametrize(
    "sequences", [1, 2, 4, 8], ids=lambda n: f"{n}-a-micro-batch" if n < 8 else "all-at-once"
)
def test_gradient_over_micro_batches(worlds: Worlds, reference: Reference, sequences: int) -> None:
    batch = weighted(make_batch(reference))
    world = worlds(1, max_tokens_per_gpu=sequences * LONGEST)
    grads, metrics, steps = world.gradient([batch], SURROGATE)
    want = reference.gradient(batch, losses.surrogate)
    assert_gradient(grads, want)
    assert_metrics(metrics, want.metrics)
    applied, norm, _ = steps[0]
    expect.holds(applied, "the step to be applied, it was skipped")
    assert all(step == steps[0] for step in steps), "ranks disagree about the step"
    expect.near(norm, want.norm, "the norm of the gradient", rel=1e-4)


@pytest.mark.parametrize(
    "aggregation", [Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, Aggregation.SEQUENCE_MEAN_TOKEN_SUM]
)
def test_gradient_of_ragged_sequences(
    worlds: Worlds, reference: Reference, every_model: None, aggregation: Aggregation
) -> None:
    """Sequences lie packed next to each other, down to one token. Tokens weigh by their
    sequence, or all the same.

    The other ways of core differ from the second one by a factor alone.
    """
    batch = weighted(make_batch(reference, RAGGED), aggregation)
    grads, _, _ = worlds(1, max_tokens_per_gpu=2 * LONGEST).gradient([batch], SURROGATE)
    assert_gradient(grads, reference.gradient(batch, losses.surrogate))


def test_gradient_over_order(worlds: Worlds, reference: Reference) -> None:
    batch = weighted(make_batch(reference))
    shuffled = batch.take([5, 2, 7, 0, 3, 6, 1, 4])
    grads, _, _ = worlds(1, max_tokens_per_gpu=2 * LONGEST).gradient([shuffled], SURROGATE)
    assert_gradient(grads, reference.gradient(batch, losses.surrogate))


# An even share of one shard, or one beside an empty one, is the batch of
# test_gradient_over_micro_batches.
SHARES = ["even", "rank-without-valid-tokens", "empty-rank"]


@pytest.mark.parametrize(
    ("num_shards", "case"), [(1, "rank-without-valid-tokens"), *product((2, 4), SHARES)]
)
def test_gradient_over_shards(
    worlds: Worlds, reference: Reference, num_shards: int, case: str
) -> None:
    """Ranks sum. Each has another number of tokens and of micro-batches, or none."""
    world = worlds(num_shards, max_tokens_per_gpu=LONGEST)
    batch = make_batch(reference)
    first = {"even": None, "rank-without-valid-tokens": [0, 1], "empty-rank": []}[case]
    batch = weighted(first_rows_masked(batch) if first else batch)
    grads, metrics, steps = world.gradient(split(batch, world, first), SURROGATE)
    want = reference.gradient(batch, losses.surrogate)
    assert_gradient(grads, want)
    assert_metrics(metrics, want.metrics)
    assert all(step == steps[0] for step in steps), "ranks disagree about the step"
    expect.near(steps[0][1], want.norm, "the norm of the gradient", rel=1e-4)


def in_pairs(reference: Reference) -> Batch:
    """Make pairs of rows, one unit and one trajectory each, far from each other."""
    unit = np.array([0, 1, 2, 3, 3, 2, 1, 0])

    batch = (
        make_batch(reference)
        .without("group")
        .with_seqs(
            unit=unit,
            trajectory=unit,
            unit_rows=np.full(len(unit), 2),
            sign=np.repeat([1, -1], 4).astype(np.float32),
        )
    )
    return weighted(batch, Aggregation.SEQUENCE_MEAN_TOKEN_SUM)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_rows_of_a_unit_share_a_micro_batch(
    worlds: Worlds, reference: Reference, num_shards: int
) -> None:
    """No two pairs fit into one, and rows by themselves would be cut otherwise."""
    batch = in_pairs(reference)
    world = worlds(num_shards, max_tokens_per_gpu=2 * LONGEST)
    loss = "coupler.testing.losses:whole_units"
    grads, metrics, _ = world.gradient(
        split(batch, world),
        loss,
        ("logprobs",),
    )
    expect.same(metrics["broken"].value, 0.0, "the rows that are apart from their unit")
    assert_gradient(grads, reference.gradient(batch, losses.nll))


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_the_gradient_of_a_pair_equals_its_formula(
    engine_subject: Subject, worlds: Worlds, reference: Reference, num_shards: int
) -> None:
    """It is ``-sigmoid(-h / 2) / 2`` times the gradient of h, the log-probs of one row
    minus those of the other, whatever the ranks and micro-batches are.
    """
    if engine_subject.toy:
        pytest.skip("the toy engine takes losses of one token alone")
    batch = in_pairs(reference)
    total = batch["sign"] * batch.sum_by_sequence(reference.outputs(batch)["logprobs"])
    margin = np.bincount(batch["unit"], total)[batch["unit"]]
    slope = -0.5 * batch["sign"] / (1 + np.exp(margin / 2))

    world = worlds(num_shards, max_tokens_per_gpu=2 * LONGEST)
    loss = "coupler.testing.losses:pair"
    grads, _, _ = world.gradient(
        split(batch, world),
        loss,
        ("logprobs",),
    )
    want = reference.gradient(
        batch.with_seqs(slope=slope),
        losses.sloped,
    )
    assert_gradient(grads, want)


def test_values_under_the_mask_change_nothing(worlds: Worlds, reference: Reference) -> None:
    batch = weighted(make_batch(reference))
    world = worlds(1, max_tokens_per_gpu=2 * LONGEST)
    clean, _, _ = world.gradient([batch], SURROGATE)
    dirty, _, steps = world.gradient([poisoned(batch)], SURROGATE)
    assert steps[0][0], "NaN under the mask made the step non-finite"
    for name, grad in clean.items():
        np.testing.assert_array_equal(dirty[name], grad, err_msg=name)


def test_a_batch_without_valid_tokens_has_a_gradient_of_zero(
    worlds: Worlds, reference: Reference
) -> None:
    batch = make_batch(reference)
    batch = weighted(batch.with_tokens(loss_mask=np.zeros(batch.num_tokens, bool)))
    grads, _, steps = worlds(1).gradient([batch], SURROGATE)
    expect.zero(grads, "in a batch without valid tokens")
    expect.same(steps[0][:2], [True, 0.0], "(applied, norm) of a batch without valid tokens")


def test_gradient_of_the_output_layer_equals_its_formula(
    worlds: Worlds, reference: Reference
) -> None:
    """The gradient of ``-log p`` at temperature 1 is dW = sum_t w_t (softmax_t -
    onehot_t) h_t^T, without automatic differentiation.
    """
    if not isinstance(reference, TransformersReference):
        pytest.skip("the toy reference is such a formula throughout")
    if "lm_head.weight" not in reference.tensors:
        pytest.skip("the gradient of a tied output layer is that of the embeddings too")
    batch = weighted(make_batch(reference).with_seqs(temperature=np.ones(len(LENGTHS), np.float32)))
    head = reference.tensors["lm_head.weight"].astype(np.float64)
    want = np.zeros_like(head)

    for i in range(len(batch)):
        one = batch.take([i])
        hidden = reference.hidden(one)
        logits = hidden @ head.T
        error = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True))
        error[np.arange(one.num_tokens), one["tokens"]] -= 1
        want += (error * one["loss_weight"][:, None]).T @ hidden

    grads, _, _ = worlds(1).gradient([batch], "coupler.testing.losses:nll", ("logprobs",))
    off = float(np.abs(grads["lm_head.weight"] - want).max())
    expect.below(
        off,
        reference.tolerance * np.abs(want).max(),
        "the difference of lm_head.weight from its formula",
    )


def test_sums_of_squared_probabilities_and_their_gradient(
    engine_subject: Subject, worlds: Worlds, reference: Reference
) -> None:
    if not engine_subject.has("output:sum_pi_squared"):
        pytest.skip(f"{engine_subject} does not declare output:sum_pi_squared")
    batch = weighted(make_batch(reference))
    world = worlds(1, max_tokens_per_gpu=2 * LONGEST)
    want = ("sum_pi_squared", "logprobs", "entropy")

    for name, got in world.forward([batch], want)[0].select(*want).tokens.items():
        np.testing.assert_allclose(
            got, reference.outputs(batch)[name], atol=LOGPROBS, rtol=1e-4, err_msg=name
        )

    alone = world.forward([batch], ("sum_pi_squared",))[0]["sum_pi_squared"]
    np.testing.assert_allclose(alone, reference.outputs(batch)["sum_pi_squared"], rtol=1e-4)
    grads, _, _ = world.gradient([batch], "coupler.testing.losses:squares", want)
    assert_gradient(grads, reference.gradient(batch, losses.squares))


# --- weights and the optimizer


def assert_checkpoint(weights: Arrays, reference: Reference) -> None:
    expect.same(
        {n: w.shape for n, w in weights.items() if w.shape != reference.tensors.get(n, w).shape},
        {},
        "the tensors of another shape",
    )
    expect.same(
        weights.keys() ^ reference.tensors.keys(), set(), "the names that weights() lacks or adds"
    )
    for name, want in reference.tensors.items():
        np.testing.assert_array_equal(weights[name], want, err_msg=name)


def test_weights_are_the_checkpoint(
    worlds: Worlds, reference: Reference, every_model: None
) -> None:
    """Names and shapes are those of the checkpoint's index, once each. Before the first
    step its values are too.
    """
    assert_checkpoint(worlds(1).weights(), reference)


def test_weights_are_whole_on_several_shards(worlds: Worlds, reference: Reference) -> None:
    assert_checkpoint(worlds(2, max_tokens_per_gpu=LONGEST).weights(), reference)


def test_steps_equal_plain_adamw(
    fresh: Callable[..., World], reference: Reference, every_model: None
) -> None:
    """Two steps equal AdamW (Loshchilov & Hutter 2019, algorithm 2), written out, with
    clipping by the global norm.

    Weight decay spares biases and norms: whatever has one axis.
    """
    beta1, beta2, eps, decay, clip = 0.8, 0.95, 1e-6, 0.1, 0.5
    settings = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": decay,
        "max_grad_norm": clip,
    }
    world = fresh(reference.folder, **settings)
    want = {name: w.astype(np.float64) for name, w in reference.tensors.items()}
    first, second = ({name: np.zeros_like(w) for name, w in want.items()} for _ in range(2))

    for t in (1, 2):
        grads, _, steps = world.gradient(
            [weighted(make_batch(reference, seed=t))], SURROGATE, index=t - 1
        )
        applied, norm, lr = steps[0]
        expect.holds(applied, f"step {t} to be applied, it was skipped")
        expect.near(lr, 1e-2, f"the learning rate of step {t}")
        assert norm > clip, "this test must clip"
        for name, w in want.items():
            g = grads[name].astype(np.float64) * clip / norm
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            mean, square = first[name] / (1 - beta1**t), second[name] / (1 - beta2**t)
            w -= lr * (mean / (np.sqrt(square) + eps) + (decay if w.ndim > 1 else 0.0) * w)

    got = world.weights()

    for name, w in want.items():
        moved = np.abs(w - reference.tensors[name]).max()
        assert np.abs(got[name] - w).max() <= 1e-3 * moved, name


# Settings of coupler.engine_kit.adamw, and the shares of lr that three steps have
SCHEDULES = {
    "warm-up": ({"warmup_steps": 4}, (0.25, 0.5, 0.75)),
    "warm-up-from": ({"warmup_steps": 2, "init_lr_ratio": 0.5}, (0.75, 1, 1)),
    "linear": ({"schedule": "linear", "total_steps": 4}, (1, 0.75, 0.5)),
    "cosine": ({"schedule": "cosine", "total_steps": 2, "min_lr_ratio": 0.5}, (1, 0.75, 0.5)),
    "cosine-cycle": ({"schedule": "cosine", "total_steps": 2, "num_cycles": 1.0}, (1, 0, 1)),
    "wsd": ({"schedule": "wsd", "total_steps": 3, "decay_steps": 2}, (1, 1, 0.5)),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_the_learning_rate_follows_its_schedule(
    fresh: Callable[..., World],
    reference: Reference,
    engine_subject: Subject,
    any_setting: None,
    case: str,
) -> None:
    """A step has the rate that it reports. The parts of a weight move by about that
    under AdamW, and by 0 at 0.
    """
    if not issubclass(engine_subject.backend.config, AdamWConfig):
        pytest.skip(f"{engine_subject} has options of its own for the learning rate")
    settings, shares = SCHEDULES[case]
    world = fresh(reference.folder, **settings)
    before = world.weights()

    for index, share in enumerate(shares):
        _, _, ((_, _, lr), *_) = world.gradient(
            [weighted(make_batch(reference, seed=index))], SURROGATE, index=index
        )
        expect.near(lr, 1e-2 * share, f"the learning rate of step {index}", abs_=1e-12)
        after = world.weights()
        moved = max(float(np.abs(after[name] - before[name]).max()) for name in before)
        expect.holds(
            lr / 2 <= moved <= 3 * lr,
            f"weights to move by about {lr:.3g} in step {index}",
            f"{moved:.3g}",
        )
        before = after


def test_a_gradient_does_not_reach_the_next_step(
    fresh: Callable[..., World], reference: Reference
) -> None:
    world = fresh(reference.folder, lr=FROZEN)
    batch = weighted(make_batch(reference))
    again = [world.gradient([batch], SURROGATE)[0] for _ in range(2)]
    for name, grad in again[0].items():
        np.testing.assert_array_equal(again[1][name], grad, err_msg=name)


def test_a_gradient_that_is_not_finite_is_not_applied(
    fresh: Callable[..., World], reference: Reference
) -> None:
    """The step is reported as skipped. It changes neither weights nor optimizer, and
    leaves no trace in the next one.
    """
    batch = weighted(make_batch(reference))
    plain, hurt = fresh(reference.folder), fresh(reference.folder)
    _, _, steps = hurt.gradient([batch], "coupler.testing.losses:not_finite")
    applied, norm, _ = steps[0]

    expect.same(applied, False, "applied, of a gradient that is not finite,")
    expect.holds(not np.isfinite(norm), "a norm that is not finite", norm)
    for name, w in hurt.weights().items():
        np.testing.assert_array_equal(w, reference.tensors[name], err_msg=name)
    wanted, again = (world.gradient([batch], SURROGATE)[2] for world in (plain, hurt))
    expect.same(again, wanted, "(applied, norm, lr) of the step after a skipped one")
    want = plain.weights()
    for name, w in hurt.weights().items():
        np.testing.assert_array_equal(w, want[name], err_msg=name)


def test_a_saved_engine_continues_as_if_nothing_had_happened(
    fresh: Callable[..., World], reference: Reference, tmp_path: Path, every_model: None
) -> None:
    first, second = (weighted(make_batch(reference, seed=seed)) for seed in (1, 2))
    world = fresh(reference.folder, deterministic=True)  # bits are compared
    world.gradient([first], SURROGATE)
    world.save(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    world.gradient([second], SURROGATE, index=1)
    resumed = fresh(reference.folder, deterministic=True)
    resumed.load(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    resumed.gradient([second], SURROGATE, index=1)
    want, got = world.weights(), resumed.weights()
    for name, w in want.items():
        np.testing.assert_array_equal(got[name], w, err_msg=name)


def test_a_checkpoint_is_read_on_another_number_of_shards(
    fresh: Callable[..., World], reference: Reference, tmp_path: Path
) -> None:
    """The weights are the same to the bit. The optimizer's memory is the same as far as
    another order of sums can tell: AdamW enlarges what it changes in the smallest
    gradients, so that the step is compared as a whole.
    """
    first, second = (weighted(make_batch(reference, seed=seed)) for seed in (1, 2))
    two = fresh(reference.folder, 2)
    two.gradient(split(first, two), SURROGATE)
    two.save(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    one = fresh(reference.folder, 1)
    one.load(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    want, got = two.weights(), one.weights()
    for name, w in want.items():
        np.testing.assert_array_equal(got[name], w, err_msg=name)
    two.gradient(split(second, two), SURROGATE, index=1)
    one.gradient([second], SURROGATE, index=1)
    before, want, got = want, two.weights(), one.weights()

    for name, w in want.items():
        moved = np.linalg.norm(w - before[name])
        assert np.linalg.norm(got[name] - w) <= 1e-2 * moved, name


def test_offload_and_onload_change_nothing(
    engine_subject: Subject, fresh: Callable[..., World], reference: Reference
) -> None:
    if not engine_subject.has("memory:offload"):
        pytest.skip(f"{engine_subject} does not declare memory:offload")
    batch = weighted(make_batch(reference))
    results = []

    for moves in (False, True):
        world = fresh(reference.folder, deterministic=True)  # bits are compared
        for index in range(2):
            if moves:
                world.move()
            world.gradient([batch], SURROGATE, index=index)
        if moves:
            world.move(10)
            assert world.move(200) < 24 << 20, "200 hand-overs leave memory flat"
        results.append(world.weights())
    for name, w in results[0].items():
        np.testing.assert_array_equal(results[1][name], w, err_msg=name)
