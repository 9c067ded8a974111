"""Rejection, normalised weights and measures of mismatch, against values worked out by
hand.
"""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
import torch

from coupler.batch import Batch
from coupler.metrics import values
from coupler.testing.reference import torch_columns
from coupler_algos.config import KL, Behaviour, GRPOConfig
from coupler_algos.corrections import binary
from coupler_algos.grpo import GRPO
from coupler_algos.slots import REJECTIONS, Correction, Ratio
from coupler_algos.weighing import MEAN_WEIGHT

# log w = log recomputed - log rollout, of two sequences with 3 and 1 sampled tokens.
LOG_WEIGHTS = (0.3, -0.5, 0.1, -0.2)


def coin(p: float, q: float) -> float:
    return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))


# The trainer's probability of every token is exp(-1).
COINS = [max(coin(exp(-1), exp(-1 - x)), coin(exp(-1 - x), exp(-1))) for x in LOG_WEIGHTS]


def batch_of(*, advantage: float = 1.0) -> Batch:
    mask = np.array([False, True, True, True, False, True])
    recomputed, rollout = np.zeros(6), np.zeros(6)
    recomputed[mask] = -1.0
    rollout[mask] = -1.0 - np.array(LOG_WEIGHTS)
    return Batch(
        np.array([4, 2]),
        {
            "tokens": np.zeros(6, np.int32),
            "loss_mask": mask,
            "old_logprobs": recomputed,
            "rollout_logprobs": rollout,
            "advantages": np.where(mask, advantage, 0.0),
        },
        {"reward": np.array([1.0, 0.0]), "group": np.array([3, 3])},
    )


def run(batch: Batch, **options: object) -> tuple[list[float], dict[str, float]]:
    """Return -loss / advantage of each sampled token, at ratio 1, and the metrics."""
    policy = GRPO(GRPOConfig(kl=KL.NONE, clip_low=0.0, clip_high=0.0, **options))
    out = {"logprobs": torch.tensor(batch["old_logprobs"])}
    loss, metrics = policy.loss(out, torch_columns(batch))
    return (-loss[batch["loss_mask"]]).tolist(), values(metrics)


def near(expected: object) -> object:
    return pytest.approx(expected, rel=1e-12, abs=1e-14)


# --- rejection


@pytest.mark.parametrize(
    ("key", "statistics"),
    [
        ("token_k1", [0.3, 0.5, 0.1, 0.2]),
        ("token_k2", [0.045, 0.125, 0.005, 0.02]),
        ("token_k3", [exp(x) - 1 - x for x in LOG_WEIGHTS]),
        # The moves of the first sequence add up to -0.1.
        ("sequence_sum_k1", [0.1, 0.1, 0.1, 0.2]),
        ("sequence_sum_k2", [0.175, 0.175, 0.175, 0.02]),
        ("sequence_sum_k3", [*[sum(exp(x) - 1 - x for x in LOG_WEIGHTS[:3])] * 3, exp(-0.2) - 0.8]),
        ("sequence_mean_k1", [0.1 / 3, 0.1 / 3, 0.1 / 3, 0.2]),
        ("sequence_mean_k2", [0.175 / 3, 0.175 / 3, 0.175 / 3, 0.02]),
        (
            "sequence_mean_k3",
            [*[sum(exp(x) - 1 - x for x in LOG_WEIGHTS[:3]) / 3] * 3, exp(-0.2) - 0.8],
        ),
        ("sequence_max_k1", [0.5, 0.5, 0.5, 0.2]),
        ("sequence_max_k2", [0.125, 0.125, 0.125, 0.02]),
        ("sequence_max_k3", [*[exp(-0.5) - 0.5] * 3, exp(-0.2) - 0.8]),
        ("token_binary", COINS),
        ("sequence_sum_binary", [*[sum(COINS[:3])] * 3, COINS[3]]),
        ("sequence_mean_binary", [*[sum(COINS[:3]) / 3] * 3, COINS[3]]),
        ("sequence_max_binary", [*[max(COINS[:3])] * 3, COINS[3]]),
    ],
)
def test_a_token_is_dropped_above_the_bound_and_not_below(
    key: str, statistics: list[float]
) -> None:
    for bound in sorted(set(statistics)):
        for slack in (1 - 1e-9, 1 + 1e-9):
            kept, metrics = run(batch_of(), reject={key: bound * slack})
            want = [0.0 if x > bound * slack else 1.0 for x in statistics]
            assert kept == want, (bound, slack)
            assert metrics["rejected"] == near(want.count(0.0) / 4)


def test_every_statistic_is_tested() -> None:
    test = test_a_token_is_dropped_above_the_bound_and_not_below
    assert {row[0] for row in test.pytestmark[0].args[1]} == set(REJECTIONS)


def test_coins_differ_by_finite_numbers_at_any_probability() -> None:
    """A sure token and one that is nearly impossible, in float32 and float64."""
    for dtype in (torch.float32, torch.float64):
        sides = torch.tensor([0.0, -1e-9, -1.0, -50.0, -1000.0], dtype=dtype)
        found = binary(sides[:, None], sides)
        assert found.isfinite().all() and (found.diagonal() == 0).all()
        assert torch.equal(found, found.T) and found[0, 4] > 10


def test_what_any_bound_drops_is_dropped() -> None:
    kept, _ = run(batch_of(), reject={"token_k1": 0.4, "sequence_sum_k1": 0.15})
    assert kept == [1, 0, 1, 0]


def test_a_bypassed_run_rejects_by_the_policy_of_now() -> None:
    """Without old log-probs the ratio and the mask are both of policy and rollout."""
    batch = batch_of().without("old_logprobs")
    policy = GRPO(
        GRPOConfig(
            kl=KL.NONE,
            clip_low=0.0,
            clip_high=0.0,
            behaviour=Behaviour.ROLLOUT,
            reject={"token_k1": 0.4},
        )
    )
    assert "old_logprobs" not in policy.needs
    now = torch.tensor(np.where(batch["loss_mask"], -1.0, 0.0), requires_grad=True)
    loss, _ = policy.loss({"logprobs": now}, torch_columns(batch))
    want = [exp(0.3), 0, exp(0.1), exp(-0.2)]
    assert (-loss.detach()[batch["loss_mask"]]).tolist() == near(want)


# --- weights over a batch


@pytest.mark.parametrize(
    ("options", "weights", "mean"),
    [
        ({}, [exp(0.3), exp(-0.5), exp(0.1), exp(-0.2)], None),
        (
            {"correction_cap": 1.2},
            [1.2, exp(-0.5), exp(0.1), exp(-0.2)],
            (1.2 + exp(-0.5) + exp(0.1) + exp(-0.2)) / 4,
        ),
        (
            {"correction": Correction.MASK, "correction_cap": 1.2, "correction_floor": 0.7},
            [0, 0, exp(0.1), exp(-0.2)],
            (exp(0.1) + exp(-0.2)) / 4,
        ),
        # Sequences count once, however long they are.
        ({"correction_ratio": Ratio.SEQUENCE}, [exp(-0.1)] * 3 + [exp(-0.2)], None),
        ({"correction_ratio": Ratio.GEOMETRIC}, [exp(-0.1 / 3)] * 3 + [exp(-0.2)], None),
    ],
    ids=["plain", "truncated", "masked", "sequences", "geometric"],
)
def test_weights_are_divided_by_their_mean(
    options: dict[str, object], weights: list[float], mean: float | None
) -> None:
    if mean is None:
        counted = [weights[0], weights[3]] if "correction_ratio" in options else weights
        mean = sum(counted) / len(counted)
    given = {"correction_cap": 5.0, **options}
    policy = GRPO(GRPOConfig(kl=KL.NONE, correction_normalize=True, **given))
    assert policy.always == {"old_logprobs"}
    found = policy.advantages(batch_of())[MEAN_WEIGHT]
    assert found.tolist() == pytest.approx([mean] * 2, rel=1e-6)

    batch = batch_of().with_seqs(**{MEAN_WEIGHT: np.full(2, mean)})
    assert run(batch, correction_normalize=True, **given)[0] == near([w / mean for w in weights])


def test_weights_that_are_all_0_stay_so() -> None:
    policy = GRPO(
        GRPOConfig(
            kl=KL.NONE,
            correction_normalize=True,
            correction=Correction.MASK,
            correction_cap=9.0,
            correction_floor=8.0,
        )
    )
    assert policy.advantages(batch_of())[MEAN_WEIGHT].tolist() == [1, 1]


# --- measures


def test_mismatch_by_hand() -> None:
    _, metrics = run(batch_of(), log_mismatch=True)
    w = [exp(x) for x in LOG_WEIGHTS]
    squares = sum(x * x for x in w)
    expected = {
        "weight": sum(w) / 4,
        "weight_max": exp(0.3),
        "chi2": squares / 4 - 1,
        "ess": 4 / squares,
        "k3": sum(exp(x) - 1 - x for x in LOG_WEIGHTS) / 4,
        "chi2_sequence": (exp(-0.2) + exp(-0.4)) / 2 - 1,
        "ess_sequence": 2 / (exp(-0.2) + exp(-0.4)),
        "ppl_train": exp(1),
        # The rollout's log-probs are -1 - log w: means 1 - 0.1 / 3 and 0.8 below 0.
        "ppl_rollout": (exp(1 - 0.1 / 3) + exp(0.8)) / 2,
        "ppl_ratio": (exp(0.1 / 3) + exp(0.2)) / 2,
    }
    found = {name.removeprefix("mismatch/"): metrics[name] for name in metrics if "mis" in name}
    assert found == near(expected)


def test_sequences_are_measured_only_where_they_are_whole() -> None:
    token, whole = (
        run(batch_of(), correction_cap=2.0, correction_ratio=ratio)[1]
        for ratio in (Ratio.TOKEN, Ratio.SEQUENCE)
    )
    assert "mismatch/ess" in token and "mismatch/ess_sequence" not in token
    assert "mismatch/ess_sequence" in whole
    assert not any(name.startswith("mismatch") for name in run(batch_of())[1])
