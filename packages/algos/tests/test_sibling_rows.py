"""A trajectory in several rows counts as one: siblings change no advantage, no loss
weight, no mini-batch and no number of a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.conversation.measures import describe
from coupler.interfaces import Aggregation, Algorithm
from coupler.loop.engine_group import _mini_batches
from coupler.loop.loss_weight import loss_weight
from coupler_algos.config import KL, GRPOConfig, RLOOConfig
from coupler_algos.grpo import GRPO
from coupler_algos.rloo import RLOO
from coupler_algos.slots import Baseline

SEEDS = range(40)
LOGPROBS = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "grpo": lambda: GRPO(GRPOConfig(kl=KL.NONE)),
    "grpo, plain": lambda: GRPO(GRPOConfig(kl=KL.NONE, scale_by_std=False)),
    "grpo, kl in the reward": lambda: GRPO(GRPOConfig(kl=KL.IN_REWARD, kl_coef=0.1)),
    "rloo, kl in the reward": lambda: RLOO(RLOOConfig(kl=KL.IN_REWARD, kl_coef=0.1)),
    "grpo, overlong": lambda: GRPO(
        GRPOConfig(kl=KL.NONE, overlong_buffer_tokens=3, overlong_max_tokens=8)
    ),
    "grpo, weighted by length": lambda: GRPO(
        GRPOConfig(kl=KL.NONE, scale_by_std=False, baseline=Baseline.LENGTH_WEIGHTED)
    ),
    "grpo, by the mean and whitened": lambda: GRPO(
        GRPOConfig(kl=KL.NONE, scale_by_std=False, scale_by_mean=True, whiten=True)
    ),
    "rloo": lambda: RLOO(RLOOConfig(kl=KL.NONE)),
    "grpo, by turn": lambda: GRPO(GRPOConfig(kl=KL.NONE, anchor_coef=1)),
    "grpo, by token": lambda: GRPO(
        GRPOConfig(kl=KL.NONE, scale_by_std=False, baseline=Baseline.OPTIMAL_TOKEN)
    ),
}


def of_one_row_each(rng: np.random.Generator) -> Batch:
    """Trajectories of ragged turns, whose sampled tokens have a number of their own."""
    sizes = rng.integers(2, 5, rng.integers(1, 5))
    masks = [rng.random(rng.integers(2, 12)) < 0.6 for _ in range(sizes.sum())]
    for mask in masks:
        mask[0], mask[-1] = False, rng.random() < 0.9
    whole = np.concatenate(masks)
    columns = {name: -rng.exponential(1, len(whole)).astype(np.float32) for name in LOGPROBS}
    turns = [np.cumsum(~mask) * mask - ~mask for mask in masks]
    return Batch(
        np.array([len(mask) for mask in masks]),
        {
            "tokens": np.where(whole, 1 + np.cumsum(whole), 0).astype(np.int32),
            "loss_mask": whole,
            "version": np.zeros(len(whole), np.int32),
            "turn": np.concatenate(turns),
            "anchor": np.concatenate(turns) % 2,
            "sum_pi_squared": np.exp(2 * columns["old_logprobs"]) + 0.01,
            **columns,
        },
        {
            "reward": rng.choice([0.0, 0.25, 1.0], len(masks)).astype(np.float32),
            "group": np.repeat(rng.permutation(len(sizes)), sizes),
            "trajectory": rng.permutation(len(masks)) + 100,
            "truncated": rng.random(len(masks)) < 0.3,
        },
    )


def of_several_rows(batch: Batch, rng: np.random.Generator) -> Batch:
    """The same, where each sampled token is trained in one of up to four rows.

    Every row repeats the whole trajectory, and has other numbers under its mask. The
    first rows stay in order.
    """
    rows = [(i + k * rng.random(), i) for i in range(len(batch)) for k in range(rng.integers(1, 5))]
    order = [i for _, i in sorted(rows)]
    split = batch.take(np.array(order))
    owners = {i: rng.choice(np.flatnonzero(np.array(order) == i), 64) for i in set(order)}

    mask = split["loss_mask"].copy()
    for row, i in enumerate(order):
        part = slice(split.starts[row], split.starts[row + 1])
        mask[part] &= owners[i][: part.stop - part.start] == row
    noise = {
        name: np.where(mask, split[name], rng.normal(size=len(mask)) * 9).astype(np.float32)
        for name in LOGPROBS
    }
    return split.with_tokens(loss_mask=mask, **noise)


def by_token(batch: Batch, column: np.ndarray) -> dict[int, float]:
    """The values of a column by the number of the sampled token."""
    mask = batch["loss_mask"]
    found = dict(zip(batch["tokens"][mask].tolist(), column[mask].tolist(), strict=True))
    assert len(found) == mask.sum(), "a token is trained twice"
    return found


@pytest.fixture(params=SEEDS)
def both(request: pytest.FixtureRequest) -> tuple[Batch, Batch]:
    rng = np.random.default_rng(request.param)
    whole = of_one_row_each(rng)
    return whole, of_several_rows(whole, rng)


def test_the_rows_of_the_test_are_siblings(both: tuple[Batch, Batch]) -> None:
    whole, split = both
    assert set(whole["trajectory"]) == set(split["trajectory"])
    assert by_token(whole, whole["old_logprobs"]) == by_token(split, split["old_logprobs"])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_siblings_change_no_advantage(both: tuple[Batch, Batch], name: str) -> None:
    one, other = (by_token(b, ALGORITHMS[name]().advantages(b)["advantages"]) for b in both)
    assert other == pytest.approx(one, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_siblings_change_no_loss_weight(
    both: tuple[Batch, Batch], aggregation: Aggregation
) -> None:
    one, other = (by_token(b, loss_weight(b, aggregation, 7)) for b in both)
    assert other == pytest.approx(one, rel=1e-6) and any(one.values())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_siblings_stay_in_one_mini_batch(both: tuple[Batch, Batch], number: int) -> None:
    parts = [
        [
            set(by_token(b.take(rows), b.take(rows)["old_logprobs"]))
            for rows in _mini_batches(b, number)
        ]
        for b in both
    ]
    assert parts[0] == parts[1] and len(parts[0]) == number


def test_siblings_change_no_number_of_a_step(both: tuple[Batch, Batch]) -> None:
    of_rows = ("batch/sequences", "batch/tokens", "batch/prompt_tokens")
    one, other = (
        {name: m.value for name, m in describe(b, 0, 0).items() if name not in of_rows}
        for b in both
    )
    assert other == pytest.approx(one) and {"reward/mean", "batch/truncated"} <= one.keys()


def test_siblings_keep_the_same_groups(both: tuple[Batch, Batch]) -> None:
    algorithm = GRPO(GRPOConfig(kl=KL.NONE, dynamic_sampling=True))
    for group in set(both[0]["group"]):
        one, other = (b.take(np.flatnonzero(b["group"] == group)) for b in both)
        assert algorithm.keep(one) == algorithm.keep(other)
