"""Generalized knowledge distillation against values worked out by hand, in float64."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch
from composed_presets import REQUIRED, algorithm
from torch import Tensor

from coupler.batch import Batch
from coupler.config.compose import compose
from coupler.config.schema import Job
from coupler.errors import ConfigError
from coupler.interfaces import Algorithm, Output
from coupler.loop.loss_weight import prepare
from coupler.metrics import values
from coupler.plugins.manager import Plugins
from coupler.testing.reference import torch_columns
from coupler_algos.gkd import divergence, with_tail

# One sample with 2 tokens and one answer of the row with 1, after a prompt of one. The
# teacher has tails of 0.2, 0.1 and 0.5, and the policy of 0.5, 0.1 and 0.25.
LENGTHS = np.array([3, 2])
ROWS = [1, 2, 4]
TEACHER = [[0.5, 0.3], [0.8, 0.1], [0.25, 0.25]]
POLICY = [[0.25, 0.25], [0.8, 0.1], [0.5, 0.25]]
FIRST = 0.5 * log(2) + 0.3 * log(1.2) + 0.2 * log(0.4)
LAST = 0.25 * log(0.5) + 0.5 * log(2)


def spread(rows: list[list[float]], filler: float) -> np.ndarray:
    column = np.full((5, 2), filler)
    column[ROWS] = np.log(rows)
    return column


def batch_of() -> Batch:
    mask = np.isin(np.arange(5), ROWS)
    zeros = np.where(mask, -1.0, np.nan)
    tokens = {
        "tokens": np.arange(5, dtype=np.int32),
        "loss_mask": mask,
        "old_logprobs": zeros,
        "rollout_logprobs": zeros,
        "teacher_top_logprobs": spread(TEACHER, np.nan),
    }
    seqs = {
        "reward": np.zeros(2, np.float32),
        "group": np.array([0, 1]),
        "data_source": np.array(["", "chat"]),
        "demonstration": np.array([False, True]),
    }
    return Batch(LENGTHS, tokens, seqs)


def loss_of(policy: Algorithm, rows: list[int]) -> tuple[float, np.ndarray, dict[str, float]]:
    """Return loss, gradient by the policy's log-probs and metrics of some rows."""
    one = prepare(policy.advantages(batch_of()), policy).take(rows)
    taken = batch_of().with_tokens(top=spread(POLICY, np.nan)).take(rows)
    top = torch.tensor(taken["top"], requires_grad=True)
    out = {"logprobs": torch.full((one.num_tokens,), -1.0).double(), "top_logprobs": top}
    columns = torch_columns(one)
    loss, metrics = policy.loss(out, columns)
    total = (loss * columns["loss_weight"]).sum()
    total.backward()
    assert top.grad is not None
    return float(total.detach()), top.grad.numpy(), values(metrics)


def test_the_divergence_is_over_the_most_likely_tokens_and_a_tail() -> None:
    """The second token agrees. The gradient of -sum p log q by log q is -p, and the
    tail's q = 1 - sum q gives each token q of it.
    """
    loss, grad, metrics = loss_of(algorithm("gkd"), [0, 1])
    assert loss == pytest.approx((FIRST + LAST) / 3, rel=1e-6)
    assert metrics["gkd"] == pytest.approx((FIRST + LAST) / 3, rel=1e-12)
    assert metrics["gkd_tail"] == pytest.approx((0.2 + 0.1 + 0.5) / 3, rel=1e-12)
    expected = np.zeros((5, 2))
    expected[1] = -0.5 + 0.2 / 0.5 * 0.25, -0.3 + 0.2 / 0.5 * 0.25
    expected[4] = -0.25 + 0.5 / 0.25 * 0.5, -0.25 + 0.5 / 0.25 * 0.25
    assert grad == pytest.approx(expected / 3, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # KL(policy || teacher), of the first token and of the answer's.
        (1.0, [0.25 * log(0.5) + 0.25 * log(5 / 6) + 0.5 * log(2.5), 0.5 * log(2) - 0.25 * log(2)]),
        # M is 0.375, 0.275 and 0.35, then 0.375, 0.25 and 0.375.
        (
            0.5,
            [
                (0.5 * log(4 / 3) + 0.3 * log(12 / 11) + 0.2 * log(4 / 7)) / 2
                + (0.25 * log(2 / 3) + 0.25 * log(10 / 11) + 0.5 * log(10 / 7)) / 2,
                0.25 * log(2 / 3) + 0.5 * log(4 / 3),
            ],
        ),
        # M is 0.25 P + 0.75 Q: 0.3125, 0.2625 and 0.425, then 0.4375, 0.25 and 0.3125.
        (
            0.25,
            [
                0.25 * (0.5 * log(1.6) + 0.3 * log(8 / 7) + 0.2 * log(8 / 17))
                + 0.75 * (0.25 * log(0.8) + 0.25 * log(20 / 21) + 0.5 * log(20 / 17)),
                0.25 * (0.25 * log(4 / 7) + 0.5 * log(1.6))
                + 0.75 * (0.5 * log(8 / 7) + 0.25 * log(0.8)),
            ],
        ),
    ],
)
def test_beta_chooses_the_divergence(beta: float, expected: list[float]) -> None:
    loss, *_ = loss_of(algorithm("gkd", f"algorithm.gkd_beta={beta}"), [0, 1])
    assert loss == pytest.approx(sum(expected) / 3, rel=1e-6)


def test_micro_batches_and_other_parts_do_not_change_it() -> None:
    """Answers have the part of their source, with its own weight and denominator."""
    given = "algorithm.sources={*: {gkd: 1, ref: 1}, chat: {gkd: 2}}"
    policy = algorithm("gkd", given, "algorithm.gkd_lambda=0.5")
    with_reference = batch_of().with_tokens(ref_logprobs=batch_of()["old_logprobs"])
    columns = policy.advantages(with_reference)["component_gkd"]
    assert columns[ROWS].tolist() == [1, 1, 2]

    both, whole, _ = loss_of(algorithm("gkd"), [0, 1])
    parts = [loss_of(algorithm("gkd"), [row]) for row in (0, 1)]
    assert sum(loss for loss, *_ in parts) == pytest.approx(both, rel=1e-12)
    assert np.concatenate([grad for _, grad, _ in parts]) == pytest.approx(whole, rel=1e-12)


# --- properties, over random distributions


def drawn(seed: int, size: int = 9) -> tuple[Tensor, Tensor]:
    """Return log-probs of 50 pairs of distributions, without a tail that rounds."""
    random = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(2, 50, size, generator=random, dtype=torch.float64)
    p, q = logits.log_softmax(-1)
    order = p.argsort(1, descending=True)
    return p.gather(1, order), q.gather(1, order)


BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 4, 8])
def test_it_is_between_0_and_the_divergence_of_all_tokens(beta: float, k: int) -> None:
    """With all tokens but one it is that, and more tokens never lower it."""
    p, q = drawn(k)
    whole = divergence(beta, p, q)
    found = divergence(beta, with_tail(p[:, :k]), with_tail(q[:, :k]))
    fewer = divergence(beta, with_tail(p[:, : k - 1]), with_tail(q[:, : k - 1]))
    assert (found > 0).all() and (found <= whole + 1e-12).all()
    assert (fewer <= found + 1e-12).all()
    if k == 8:
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)
    same = divergence(beta, with_tail(p[:, :k]), with_tail(p[:, :k]))
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-12)


def test_its_ends_are_the_limits_of_what_lies_between() -> None:
    p, q = drawn(1)
    near = 1e-7
    forward, reverse = divergence(0.0, p, q), divergence(1.0, p, q)
    torch.testing.assert_close(divergence(near, p, q) / near, forward, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(divergence(1 - near, p, q) / near, reverse, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(divergence(0.3, p, q), divergence(0.7, q, p), rtol=1e-9, atol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_a_policy_that_agrees_has_no_gradient(beta: float) -> None:
    p, _ = drawn(2)
    logits = p.clone().requires_grad_()
    q = logits.log_softmax(-1)[:, :4]
    divergence(beta, with_tail(p[:, :4]), with_tail(q)).sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-9


def test_the_gradient_by_logits_is_that_of_coarse_outcomes() -> None:
    """dz = q - p of a likely token, and q (1 - p / q of the tail) of another."""
    p, other = drawn(3)
    logits = other.clone().requires_grad_()
    q = logits.log_softmax(-1)
    divergence(0.0, with_tail(p[:, :4]), with_tail(q[:, :4])).sum().backward()
    probabilities = q.detach().exp()
    tails = p[:, 4:].exp().sum(1) / probabilities[:, 4:].sum(1)
    expected = probabilities - p.exp()
    expected[:, 4:] = probabilities[:, 4:] * (1 - tails[:, None])
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_certain_tokens_and_missing_ids_are_finite(beta: float) -> None:
    """In float32: all probability on one token, and ids that there are none of."""
    sure, none = [0.0, -40.0, -1e6], [log(0.5), -1e6, -1e6]
    p = torch.tensor([sure, none, sure])
    q = torch.tensor([none, sure, sure], requires_grad=True)
    found = divergence(beta, with_tail(p), with_tail(q))
    found.sum().backward()
    assert q.grad is not None
    assert found.isfinite().all() and q.grad.isfinite().all()
    assert abs(found[2]) < 1e-7


# --- what it asks of a run


def test_a_share_of_prompts_has_answers_in_the_place_of_samples() -> None:
    policy = algorithm("gkd", "algorithm.gkd_lambda=0.25", "samples_per_prompt=3")
    asked = [policy.num_sampled("", 3, draw) for draw in (0.0, 0.24, 0.25, 0.99)]
    assert asked == [3, 3, 0, 0]
    assert policy.needs >= {"demonstration", "teacher_top_logprobs"}
    assert Output("top_logprobs") in policy.want
    assert "demonstration" not in algorithm("gkd").needs
    assert algorithm("gkd").num_sampled("", 3, 1 - 1e-9) == 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["algorithm=gkd", "algorithm.gkd_beta=1.5"], "gkd_beta=1.5 must be between 0 and 1"),
        (["algorithm=gkd", "algorithm.gkd_lambda=-1"], "gkd_lambda=-1.* must be between 0 and 1"),
        (
            ["algorithm=grpo", "samples_per_prompt=2", "algorithm.gkd_beta=0.5"],
            "algorithm.gkd_beta=0.5 is of the part gkd, .* set it to 0, or choose algorithm=gkd",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose(Plugins.load(), [*REQUIRED, *given], job=Job.TRAIN)
