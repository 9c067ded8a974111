"""The losses of preferences: numbers by hand in float64, and gradients by the direct
formula, whatever the rows, sides and micro-batches are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from coupler.batch import Batch
from coupler.loop.loss_weight import loss_weight, prepare
from coupler.metrics import merge, read, values
from coupler_algos.preference_config import DPOConfig, KTOConfig, PairLoss, RewardModelConfig
from coupler_algos.preferences import DPO, KTO, RewardModel

SIGMA_1 = 0.2689414213699951  # sigmoid(-1)
LOG_1 = 0.31326168751822286  # log(1 + exp(-1))
LOG_2 = 2.1269280110429727  # log(1 + exp(2))
SIGMA_2 = 0.8807970779778823  # sigmoid(2)


def paired(lengths: list[int], unit: list[int], chosen: list[bool], **columns: Any) -> Batch:
    """Rows of pairs, whose first token is their prompt."""
    sizes = np.array(lengths, np.int64)
    mask = np.ones(sizes.sum(), bool)
    mask[np.cumsum(sizes) - sizes] = False
    tokens = {"tokens": np.zeros(sizes.sum(), np.int32), "loss_mask": mask, **columns}
    names = np.array(unit, np.int64)
    seqs = {
        "unit": names,
        "trajectory": names,
        "chosen": np.array(chosen),
        "margin": np.zeros(len(sizes), np.float32),
    }
    return Batch(sizes, tokens, seqs)


@pytest.fixture
def two() -> Batch:
    """Two pairs with log-ratios 1 and -1, and -1 and 3: margins 2 and -4."""
    reference = np.array([0, -1.5, -2.5, 0, -2, 0, -4, 0, -1, -1, -1])
    return paired([3, 2, 2, 4], [7, 7, 3, 3], [True, False, True, False], ref_logprobs=reference)


LOGPROBS = np.array([0, -1, -2, 0, -3, 0, -5, 0, 0, 0, 0], np.float64)


def evaluated(algorithm: Any, batch: Batch, columns: Callable, **outputs: np.ndarray) -> Any:
    """The step's loss, its metrics, and its gradient by each output."""
    out = {name: torch.tensor(value, requires_grad=True) for name, value in outputs.items()}
    loss, metrics = algorithm.loss(out, columns(batch))
    assert loss.shape == (batch.num_tokens,)
    weight = torch.from_numpy(loss_weight(batch, algorithm.aggregation).astype(np.float64))
    total = (loss * weight).sum()
    total.backward()
    grads = {name: tensor.grad.numpy() for name, tensor in out.items()}
    return float(total.detach()), values(read(metrics)), grads


def test_dpo_by_hand(two: Batch, columns: Callable) -> None:
    """Since beta h is 1 and -2, losses are log(1 + e^-1) and log(1 + e^2)."""
    loss, metrics, grads = evaluated(DPO(DPOConfig(beta=0.5)), two, columns, logprobs=LOGPROBS)
    assert loss == pytest.approx((LOG_1 + LOG_2) / 2, rel=1e-12)
    first, second = 0.5 * SIGMA_1 / 2, 0.5 * SIGMA_2 / 2
    want = [0, -first, -first, 0, first, 0, -second, 0, second, second, second]
    np.testing.assert_allclose(grads["logprobs"], want, rtol=1e-12)

    assert metrics == pytest.approx(
        {
            "rewards/chosen": 0.5 * (1 - 1) / 2,
            "rewards/rejected": 0.5 * (-1 + 3) / 2,
            "rewards/margin": 0.5 * (2 - 4) / 2,
            "rewards/accuracy": 0.5,
            "logps/chosen": (-3 - 5) / 2,
            "logps/rejected": (-3 + 0) / 2,
        }
    )


def by_hand(loss: PairLoss, h: float, beta: float, smoothing: float) -> tuple[float, float]:
    """The loss of a margin and its slope, with numbers alone."""
    x = beta * h
    match loss:
        case PairLoss.SIGMOID:
            value = (1 - smoothing) * math.log1p(math.exp(-x)) + smoothing * math.log1p(math.exp(x))
            up = 1 / (1 + math.exp(-x))
            return value, beta * (smoothing * up - (1 - smoothing) * (1 - up))
        case PairLoss.IPO:
            return (h - 1 / (2 * beta)) ** 2, 2 * (h - 1 / (2 * beta))
        case PairLoss.HINGE:
            return max(0.0, 1 - x), -beta if x < 1 else 0.0


@pytest.mark.parametrize(
    ("loss", "smoothing"),
    [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0), ("hinge", 0.0)],
)
def test_every_loss_by_its_margin(
    two: Batch, columns: Callable, loss: str, smoothing: float
) -> None:
    config = DPOConfig(beta=0.4, loss=PairLoss(loss), label_smoothing=smoothing)
    total, _, grads = evaluated(DPO(config), two, columns, logprobs=LOGPROBS)
    (one, first), (other, second) = (by_hand(config.loss, h, 0.4, smoothing) for h in (2.0, -4.0))
    assert total == pytest.approx((one + other) / 2, rel=1e-12)
    want = [0, first, first, 0, -first, 0, second, 0, -second, -second, -second]
    np.testing.assert_allclose(grads["logprobs"], np.array(want) / 2, rtol=1e-12)


def test_length_normalised_takes_means(two: Batch, columns: Callable) -> None:
    """Log-ratios are 1 / 2 and -1, and -1 and 3 / 3: margins 1.5 and -2."""
    config = DPOConfig(beta=0.4, length_normalised=True)
    total, _, grads = evaluated(DPO(config), two, columns, logprobs=LOGPROBS)
    (one, first), (other, second) = (by_hand(config.loss, h, 0.4, 0) for h in (1.5, -2.0))
    assert total == pytest.approx((one + other) / 2, rel=1e-12)
    want = [0, first / 2, first / 2, 0, -first, 0, second, 0, *[-second / 3] * 3]
    np.testing.assert_allclose(grads["logprobs"], np.array(want) / 2, rtol=1e-12)


def test_reference_free_needs_no_reference(two: Batch, columns: Callable) -> None:
    algorithm = DPO(DPOConfig(beta=1.0, reference_free=True))
    assert not algorithm.needs
    batch = two.without("ref_logprobs")
    total, _, _ = evaluated(algorithm, batch, columns, logprobs=LOGPROBS)
    wanted = [by_hand(PairLoss.SIGMOID, h, 1.0, 0)[0] for h in (-3 + 3, -5 - 0)]
    assert total == pytest.approx(sum(wanted) / 2, rel=1e-12)


def test_sft_coef_adds_the_mean_likelihood_of_what_is_chosen(two: Batch, columns: Callable) -> None:
    """Of the pairs, -(-1 - 2) / 2 and 5 nats a token: 3.25 in the mean."""
    plain, _, before = evaluated(DPO(DPOConfig()), two, columns, logprobs=LOGPROBS)
    config = DPOConfig(sft_coef=0.3)
    total, metrics, grads = evaluated(DPO(config), two, columns, logprobs=LOGPROBS)
    assert total - plain == pytest.approx(0.3 * (1.5 + 5) / 2, rel=1e-12)
    assert metrics["nll"] == pytest.approx((1 + 2 + 5) / 3)
    want = -0.3 * np.array([0, 0.5, 0.5, 0, 0, 0, 1, 0, 0, 0, 0]) / 2
    np.testing.assert_allclose(grads["logprobs"] - before["logprobs"], want, atol=1e-12)


def test_kto_by_hand(columns: Callable) -> None:
    """Rewards are 2, -1 and 0.5, the mismatched ratios 1 and 0: the point is 0.5."""
    old = np.array([0, 1, 1, 0, -1, 0, 0.5, 0, 1, 0, 0])
    batch = Batch(
        np.array([3, 2, 2, 2, 2]),
        {
            "tokens": np.zeros(11, np.int32),
            "loss_mask": np.array([0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1], bool),
            "old_logprobs": old,
            "ref_logprobs": np.zeros(11),
        },
        {
            "unit": np.arange(5),
            "desirable": np.array([True, False, True, False, False]),
            "mismatched": np.array([False, False, False, True, True]),
        },
    )
    config = KTOConfig(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    algorithm = KTO(config)
    ready = algorithm.advantages(batch)
    assert len(ready) == 3 and ready["reference_point"].tolist() == [0.5] * 3

    total, metrics, grads = evaluated(algorithm, ready, columns, logprobs=old[:7])
    x = [0.5 * 1.5, -0.5 * -1.5, 0.0]  # sign * beta * (r - z)
    down = [1 / (1 + math.exp(each)) for each in x]
    assert total == pytest.approx((2 * down[0] + 3 * down[1] + 2 * down[2]) / 3, rel=1e-7)
    slope = [d * (1 - d) * 0.5 for d in down]
    want = [0, -2 * slope[0], -2 * slope[0], 0, 3 * slope[1], 0, -2 * slope[2]]
    np.testing.assert_allclose(grads["logprobs"], np.array(want) / 3, rtol=1e-7)
    assert metrics["rewards/desirable"] == pytest.approx(0.5 * 2.5 / 2)
    assert metrics["rewards/undesirable"] == pytest.approx(-0.5)
    assert metrics["kto/reference_point"] == pytest.approx(0.5)


@pytest.mark.parametrize("ratio", [[], [-3.0], [-1.0, 0.5]])
def test_the_reference_point_is_never_negative(ratio: list[float]) -> None:
    """It estimates a divergence. Without a mismatched row it is 0."""
    size = 1 + len(ratio)
    batch = Batch(
        np.ones(size, np.int64),
        {
            "tokens": np.zeros(size, np.int32),
            "loss_mask": np.ones(size, bool),
            "old_logprobs": np.array([9.0, *ratio]),
            "ref_logprobs": np.zeros(size),
        },
        {"desirable": np.ones(size, bool), "mismatched": np.arange(size) > 0},
    )
    ready = KTO(KTOConfig()).advantages(batch)
    assert len(ready) == 1 and ready["reference_point"].tolist() == [0.0]


def test_scores_by_hand(columns: Callable) -> None:
    """Scores 2 and 0.5 with margin 0.5, and -1 and 1: x = 1 and -2."""
    batch = paired([2, 2, 2, 2], [0, 0, 1, 1], [True, False, False, True]).with_seqs(
        margin=np.array([0.5, 0.5, 0, 0], np.float32)
    )
    scores = np.array([0, 2, 0, 0.5, 0, 1, 0, -1], np.float64)
    config = RewardModelConfig(centering_coef=0.1)
    total, metrics, grads = evaluated(RewardModel(config), batch, columns, values=scores)
    assert total == pytest.approx((LOG_1 + LOG_2 + 0.1 * 2.5**2) / 2, rel=1e-12)
    pull = 2 * 0.1 * 2.5
    want = [0, pull - SIGMA_1, 0, pull + SIGMA_1, 0, SIGMA_2, 0, -SIGMA_2]
    np.testing.assert_allclose(grads["values"], np.array(want) / 2, rtol=1e-12)
    assert metrics == pytest.approx(
        {
            "rewards/chosen": 0.5,
            "rewards/rejected": 0.75,
            "rewards/margin": -0.25,
            "rewards/accuracy": 0.5,
        }
    )


def drawn(seed: int) -> tuple[Batch, np.ndarray]:
    """Pairs with one to three rows a side, tokens of prompts between, in any order."""
    random = np.random.default_rng(seed)
    rows = [
        (pair, side)
        for pair in random.permutation(50)[:5]
        for side in (True, False)
        for _ in range(random.integers(1, 4))
    ]
    rows = [rows[i] for i in random.permutation(len(rows))]
    lengths = random.integers(2, 9, len(rows)).tolist()
    batch = paired(lengths, [int(p) for p, _ in rows], [s for _, s in rows])
    mask = batch["loss_mask"] & (random.random(batch.num_tokens) < 0.8)
    mask[batch.starts[:-1] + 1] = True
    reference = -random.exponential(1, batch.num_tokens)
    logprobs = -random.exponential(1, batch.num_tokens)
    return batch.with_tokens(loss_mask=mask, ref_logprobs=reference), logprobs


def directly(config: DPOConfig, batch: Batch, logprobs: torch.Tensor) -> torch.Tensor:
    """The mean loss over pairs, one pair after the other."""
    seq = np.repeat(np.arange(len(batch)), batch.lengths)
    losses = []
    for pair in np.unique(batch["unit"]):
        sides = []
        for chosen in (True, False):
            rows = np.flatnonzero((batch["unit"] == pair) & (batch["chosen"] == chosen))
            at = np.flatnonzero(batch["loss_mask"] & np.isin(seq, rows))
            sides.append((logprobs[at] - torch.from_numpy(batch["ref_logprobs"][at])).sum())
            if chosen:
                nll = -logprobs[at].mean()
        losses.append(-logsigmoid(config.beta * (sides[0] - sides[1])) + config.sft_coef * nll)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("seed", range(20))
def test_the_gradient_is_that_of_the_formula(seed: int, columns: Callable) -> None:
    batch, logprobs = drawn(seed)
    config = DPOConfig(beta=0.3, sft_coef=0.2)
    total, _, grads = evaluated(DPO(config), batch, columns, logprobs=logprobs)
    true = torch.tensor(logprobs, requires_grad=True)
    want = directly(config, batch, true)
    want.backward()
    assert total == pytest.approx(float(want), rel=1e-6)
    assert true.grad is not None
    np.testing.assert_allclose(grads["logprobs"], true.grad.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_parts_of_whole_pairs_add_up(seed: int, columns: Callable) -> None:
    """Each pair in a micro-batch of its own gives the losses, gradients and metrics of
    all at once, and NaN under the mask gives nothing.
    """
    batch, logprobs = drawn(seed)
    batch = prepare(batch, DPO(DPOConfig()))
    dirty = np.where(batch["loss_mask"], logprobs, np.nan)
    algorithm, found, metrics = DPO(DPOConfig(beta=0.3, sft_coef=0.2)), {}, []
    seq = np.repeat(np.arange(len(batch)), batch.lengths)

    for pair in np.unique(batch["unit"]):
        rows = np.flatnonzero(batch["unit"] == pair)
        at = np.flatnonzero(np.isin(seq, rows))
        out = {"logprobs": torch.tensor(dirty[at], requires_grad=True)}
        part = batch.take(rows)
        loss, measured = algorithm.loss(out, columns(part))
        (loss * torch.from_numpy(part["loss_weight"])).sum().backward()
        assert out["logprobs"].grad is not None
        found |= dict(zip(at.tolist(), out["logprobs"].grad.tolist(), strict=True))
        metrics.append(read(measured))

    _, want, grads = evaluated(algorithm, batch, columns, logprobs=logprobs)
    got = np.array([found[at] for at in range(batch.num_tokens)])
    np.testing.assert_allclose(got, grads["logprobs"], rtol=1e-6, atol=1e-9)
    assert values(merge(metrics)) == pytest.approx(want, rel=1e-6)


def test_a_micro_batch_may_be_empty(two: Batch, columns: Callable) -> None:
    empty = two.take([])
    for algorithm, name in (
        (DPO(DPOConfig()), "logprobs"),
        (RewardModel(RewardModelConfig()), "values"),
    ):
        total, metrics, _ = evaluated(algorithm, empty, columns, **{name: np.zeros(0)})
        assert total == 0 and set(metrics.values()) <= {0.0}
