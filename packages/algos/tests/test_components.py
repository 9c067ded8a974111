"""A loss of parts by the kind of row, against values worked out by hand, in float64."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
import torch
from composed_presets import REQUIRED, algorithm

from coupler.batch import Batch
from coupler.config.compose import compose
from coupler.config.schema import Job
from coupler.errors import ConfigError, CouplerError
from coupler.interfaces import Algorithm
from coupler.loop.loss_weight import prepare
from coupler.metrics import values
from coupler.plugins.manager import Plugins
from coupler.testing.reference import torch_columns

MIXED = (
    "algorithm.sources={math: {rl: 1}, chat: {teacher: 2, ref: 0.5}, good: {ce: 3}}",
    "algorithm.kl=none",
    "algorithm.aggregation=token_mean",
    "algorithm.scale_by_std=false",
)
# Two samples of math with 1 and 3 sampled tokens after a prompt of one, one of chat
# with 2, and two of good with 2 and 1, of which the second has a reward of 0.
LENGTHS = np.array([2, 4, 3, 3, 2])
SOURCES = np.array(["math", "math", "chat", "good", "good"])
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.0], np.float32)
FIRST = np.array([0, 2, 6, 9, 12])
CHAT, GOOD = np.array([7, 8]), np.array([10, 11])


def batch_of(sources: np.ndarray = SOURCES) -> Batch:
    """The policy had log-probs of -1, the reference -1.5, the teacher -0.5 and -3."""
    size = int(LENGTHS.sum())
    mask = np.ones(size, bool)
    mask[FIRST] = False
    teacher = np.full(size, np.nan)
    teacher[mask] = -1
    teacher[CHAT] = -0.5, -3
    tokens = {
        "tokens": np.arange(size, dtype=np.int32),
        "loss_mask": mask,
        "old_logprobs": np.where(mask, -1.0, np.nan),
        "ref_logprobs": np.where(mask, -1.5, np.nan),
        "teacher_logprobs": teacher,
        "rollout_logprobs": np.where(mask, -1.0, np.nan),
    }
    seqs = {"reward": REWARDS, "group": np.array([0, 0, 1, 2, 2]), "data_source": sources}
    return Batch(LENGTHS, tokens, seqs)


def gradient(
    policy: Algorithm, batch: Batch, rows: list[list[int]]
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Return loss, gradient by log-prob and metrics, from micro-batches of ``rows``."""
    total, grad = 0.0, np.zeros(batch.num_tokens)
    found: dict[str, float] = {}
    for some in rows:
        one = batch.take(some)
        now = torch.full((one.num_tokens,), -1.0, dtype=torch.float64, requires_grad=True)
        columns = torch_columns(one)
        loss, metrics = policy.loss({"logprobs": now}, columns)
        (loss * columns["loss_weight"]).sum().backward()
        assert now.grad is not None
        total += float((loss * columns["loss_weight"]).detach().sum())
        at = np.concatenate([np.arange(*batch.starts[row : row + 2]) for row in some])
        grad[at], found = now.grad.numpy(), values(metrics)
    return total, grad, found


@pytest.fixture
def mixed() -> Algorithm:
    return algorithm("grpo", *MIXED)


def test_each_part_is_divided_by_its_own_tokens(mixed: Algorithm) -> None:
    """Rewards of math are 1 and 0, so its advantages are 0.5 and -0.5 over 4 tokens.
    The teacher's of chat are 0.5 and -2 over 2, with weight 2. k3 of the reference is
    exp(-0.5) - 1 + 0.5. One sample of good counts, with 2 tokens and weight 3.
    """
    batch = prepare(mixed.advantages(batch_of()), mixed)
    loss, grad, metrics = gradient(mixed, batch, [[0, 1, 2, 3, 4]])

    k3 = exp(-0.5) - 0.5
    parts = (-0.5 + 3 * 0.5) / 4, 2 * (-0.5 + 2) / 2, 0.5 * k3, 3 * 1.0
    assert loss == pytest.approx(sum(parts), rel=1e-6)
    expected = np.zeros(batch.num_tokens)
    expected[1], expected[3:6] = -0.5 / 4, 0.5 / 4
    expected[CHAT] = np.array([-0.5, 2.0]) + 0.25 * (1 - exp(-0.5))
    expected[GOOD] = -3 / 2
    assert grad == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert metrics["kl_ref"] == pytest.approx(k3, rel=1e-6)
    assert metrics["kl_teacher"] == pytest.approx(-1 + 1.75, rel=1e-6)
    assert metrics["nll"] == pytest.approx(1)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize(
    "rows", [[[0], [1], [2], [3], [4]], [[4, 2], [1, 3, 0]], [[2, 3], [0, 1, 4]]]
)
def test_no_split_changes_the_gradient(aggregation: str, rows: list[list[int]]) -> None:
    policy = algorithm("grpo", *MIXED, f"algorithm.aggregation={aggregation}")
    batch = prepare(policy.advantages(batch_of()), policy)
    whole = gradient(policy, batch, [[0, 1, 2, 3, 4]])
    parts = gradient(policy, batch, rows)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    assert parts[1] == pytest.approx(whole[1], rel=1e-12, abs=1e-15)


def test_other_rows_do_not_change_the_denominator_of_a_part(mixed: Algorithm) -> None:
    batch = mixed.advantages(batch_of())
    whole, alone = prepare(batch, mixed), prepare(batch.take([0, 1]), mixed)
    mine = slice(0, int(LENGTHS[:2].sum()))
    assert (whole["component_rl"][mine] == alone["component_rl"]).all()
    assert alone["component_rl"].max() == pytest.approx(1 / 4)
    assert not alone["component_teacher"].any()


@pytest.fixture
def shown() -> Batch:
    """The second sample of math and that of chat are answers of their rows."""
    batch = batch_of(np.array(["math", "math", "chat", "math", "math"]))
    answers = np.array([False, True, True, False, False])
    return batch.with_seqs(demonstration=answers, group=np.array([0, 0, 1, 0, 0]))


def test_answers_of_rows_have_a_loss_and_a_denominator_of_their_own(shown: Batch) -> None:
    """Samples of math have rewards of 1, 1 and 0 over 1, 2 and 1 tokens, and answers
    have 3 and 2 tokens with weights of 2 and 4. No part of samples is of an answer.
    """
    parts = "algorithm.sources={math: {rl: 1, ref: 0.5, demo: 2}, chat: {demo: 4}}"
    policy = algorithm("grpo", parts, *MIXED[1:])
    batch = prepare(policy.advantages(shown), policy)
    loss, grad, metrics = gradient(policy, batch, [[0, 1, 2, 3, 4]])

    k3 = exp(-0.5) - 0.5
    assert loss == pytest.approx(-(3 / 3 - 2 / 3) / 4 + 0.5 * k3 + (3 * 2 + 2 * 4) / 5, rel=1e-6)
    expected, slope = np.zeros(batch.num_tokens), 0.5 * (1 - exp(-0.5)) / 4
    expected[[1, *GOOD]] = -1 / 3 / 4 + slope
    expected[13] = 2 / 3 / 4 + slope
    expected[3:6], expected[CHAT] = -2 / 5, -4 / 5
    assert grad == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert metrics["nll_demo"] == pytest.approx(1)
    assert "nll" not in metrics

    for rows in ([[0], [1], [2], [3], [4]], [[4, 2], [1, 3, 0]]):
        cut = gradient(policy, batch, rows)
        assert cut[0] == pytest.approx(loss, rel=1e-12)
        assert cut[1] == pytest.approx(grad, rel=1e-12, abs=1e-15)


def test_an_answer_takes_the_place_of_one_sample_or_of_all() -> None:
    given = "algorithm.sources={math: {rl: 1, demo: 1}, chat: {demo: 1}, code: {rl: 1}}"
    policy = algorithm("grpo", given, "algorithm.kl=none", "samples_per_prompt=4")
    asked = [policy.num_sampled(source, 4, 0.3) for source in ("math", "chat", "code")]
    assert asked == [3, 0, 4]
    assert policy.needs >= {"demonstration", "data_source"}


def test_dynamic_sampling_looks_at_samples_alone(shown: Batch) -> None:
    given = "algorithm.sources={math: {rl: 1, demo: 1}, chat: {demo: 1}}"
    policy = algorithm(
        "grpo", given, "algorithm.kl=none", "algorithm.dynamic_sampling=true",
        "samples_per_prompt=4",
    )  # fmt: skip
    assert not policy.keep(shown.take([0, 1, 3]))
    assert policy.keep(shown.take([0, 1, 4]))
    assert policy.keep(shown.take([2]))


def test_corrections_are_measured_on_samples_alone(shown: Batch) -> None:
    """The rollout knows nothing of the tokens of an answer."""
    given = "algorithm.sources={math: {rl: 1, demo: 1}, chat: {demo: 1}}"
    more = ("algorithm.correction_cap=2", "algorithm.correction_normalize=true")
    policy = algorithm("grpo", given, "algorithm.kl=none", "samples_per_prompt=4", *more)
    answers = shown.spread(shown["demonstration"])
    rollout = np.where(answers, 0, shown["rollout_logprobs"])
    batch = policy.advantages(shown.with_tokens(rollout_logprobs=rollout))
    assert batch["mean_weight"] == pytest.approx(1)


def test_one_source_of_rewards_is_grpo() -> None:
    mixed = algorithm("grpo", "algorithm.sources={all: {rl: 1}}", "algorithm.kl=none")
    plain = algorithm("grpo", "algorithm.kl=none")
    batch = batch_of(np.full(5, "all")).take([0, 1, 3, 4])
    found = [gradient(p, prepare(p.advantages(batch), p), [[0, 1, 2, 3]]) for p in (mixed, plain)]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
    assert np.abs(found[1][1]).max() > 0.05


def test_dynamic_sampling_asks_only_groups_that_learn_from_rewards() -> None:
    policy = algorithm("grpo", *MIXED, "algorithm.dynamic_sampling=true")
    batch = batch_of()
    equal = batch.with_seqs(reward=np.zeros(5, np.float32))
    assert policy.keep(batch.take([0, 1]))
    assert not policy.keep(equal.take([0, 1]))
    assert policy.keep(equal.take([2]))


def test_a_source_that_is_not_named_is_refused(mixed: Algorithm) -> None:
    with pytest.raises(CouplerError, match="data_source='code', which algorithm"):
        mixed.advantages(batch_of(np.array(["math", "math", "code", "good", "good"])))


def test_a_star_stands_for_all_other_sources() -> None:
    given = "algorithm.sources={chat: {ref: 0.5}, *: {rl: 1}}"
    policy = algorithm("grpo", given, "algorithm.kl=none")
    batch = policy.advantages(batch_of())
    of_chat = batch.spread(np.array([False, False, True, False, False]))
    assert (batch["component_rl"] == (batch["loss_mask"] & ~of_chat)).all()
    assert (batch["component_ref"] == 0.5 * (batch["loss_mask"] & of_chat)).all()


def test_columns_that_parts_read_are_asked_for(mixed: Algorithm) -> None:
    read = {"data_source", "ref_logprobs", "teacher_logprobs", "old_logprobs"}
    assert mixed.needs == read
    assert mixed.always == {"old_logprobs"}
    assert "ref_logprobs" not in algorithm("grpo", "algorithm.kl=none").needs


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("algorithm.sources={a: {sft: 1}}", "algorithm.sources.a.sft is no part of the loss"),
        ("algorithm.sources={a: {rl: 0}}", "algorithm.sources.a.rl=0.* must be a number above 0"),
        ("algorithm.sources={a: {}}", "algorithm.sources.a takes the weights of parts"),
        ("algorithm.ce_above=1", "algorithm.ce_above=1.0 chooses samples for ce"),
        ("algorithm.sources={a: {rl: 1}} algorithm.kl=in_loss", "algorithm.kl=in_loss would"),
        ("algorithm.sources={a: {ce: 1}} algorithm.kl=in_reward", "algorithm.kl=in_reward changes"),
        (
            "algorithm.sources={a: {ref: 1}} algorithm.kl_estimator=k1",
            "zero expectation in the part ref",
        ),
        (
            "algorithm.sources={a: {teacher: 1}} algorithm.ratio=sequence",
            "the part teacher of algorithm.sources has one for each",
        ),
        (
            "algorithm.sources={a: {rl: 1, demo: 1}}",
            "samples_per_prompt=2 is too few for algorithm.sources.a, .* set samples_per_prompt=3",
        ),
        ("algorithm.sources={a: {rl: 1}} algorithm.teacher_coef=1", "set these to 0 and 1"),
        (
            "algorithm.sources={a: {rl: 1}} algorithm.second_moment=0.1",
            "has several: set them to 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given: str, sentence: str) -> None:
    overrides = given.replace("} alg", "}\nalg").split("\n")
    more = ("algorithm=grpo", "algorithm.kl=none", "samples_per_prompt=2")
    with pytest.raises(ConfigError, match=sentence):
        compose(Plugins.load(), [*REQUIRED, *more, *overrides], job=Job.TRAIN)
