"""Every preset passes what the conformance kit asks of an algorithm.

The kit itself is pointed at backends, with their defaults. Here its checks run over all
presets: permuted rows, NaN under the mask, rows of one token or of none that was
sampled, equal rewards, groups of one, micro-batches, and trajectories of several rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature

import numpy as np
import pytest
from composed_presets import NAMES
from composed_presets import algorithm as composed

from coupler.batch import Batch
from coupler.interfaces import Algorithm
from coupler.testing.conformance import test_algorithm as kit
from coupler.testing.models import write_toy
from coupler.testing.reference import ToyReference
from coupler.testing.subject import Subject
from coupler_algos import plugin
from coupler_algos.grpo import GRPO

# Options of sequences and corrections, beyond what presets set.
MIXED = {
    "grpo, corrected": (
        "grpo",
        "algorithm.correction_cap=2",
        "algorithm.correction_normalize=true",
        "algorithm.reject={token_k1: 0.5, sequence_max_k2: 0.3, sequence_mean_k3: 0.2}",
    ),
    "rloo, corrected": (
        "rloo",
        "algorithm.correction_cap=3",
        "algorithm.correction=mask",
        "algorithm.correction_floor=0.3",
        "algorithm.opsm_delta=0.1",
        "algorithm.log_mismatch=true",
    ),
    "grpo, of parts": (
        "grpo",
        "algorithm.sources={*: {rl: 1, ref: 0.1, demo: 0.5, gkd: 2, teacher: 0.3}}",
        "algorithm.kl=none",
        "algorithm.gkd_beta=0.3",
        "algorithm.gkd_lambda=0.5",
        "samples_per_prompt=4",
    ),
    "ppo, held": (
        "ppo",
        "algorithm.proximal_coef=0.1",
        "algorithm.covariance_share=0.1",
        "algorithm.covariance_kl=1",
        "algorithm.log_mismatch=true",
    ),
}


CHECKS: dict[str, Callable[..., None]] = {
    "it declares": kit.test_it_declares_what_core_knows,
    "per token": kit.test_the_loss_is_per_token_and_finite,
    "without old log-probs": kit.test_old_logprobs_may_be_left_out,
    "NaN under the mask": kit.test_values_under_the_mask_change_nothing,
    "permuted": kit.test_order_changes_nothing,
    "in micro-batches": partial(kit.test_micro_batches_change_nothing, size=2),
    "siblings": kit.test_micro_batches_of_whole_units_change_nothing,
    "no sequence": partial(kit.test_an_empty_micro_batch_passes, case="no-sequence"),
    "none valid": partial(kit.test_an_empty_micro_batch_passes, case="no-valid-token"),
    "groups": kit.test_groups_come_from_their_column,
    "equal rewards": kit.test_degenerate_rewards_are_finite,
    "a group of one": kit.test_a_group_of_one_is_finite_or_refused,
    "equal tokens": kit.test_equal_tokens_pull_alike,
    "large rewards": partial(kit.test_rewards_of_any_size_are_finite, scale=1e4),
}


class Parted(GRPO):
    """GDPO, with two parts made of each reward."""

    def advantages(self, batch: Batch) -> Batch:
        reward = batch["reward"]
        parts = {"reward_parts/a": reward, "reward_parts/b": np.abs(reward - 1)}
        return super().advantages(batch.with_seqs(**parts))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    batch = kit.sampled(ToyReference(write_toy(tmp_path_factory.mktemp("models") / "toy")))
    # Of each group one sample is the best, and it has tokens.
    return batch.with_seqs(reward=np.array([0, 1, 3, 0.5, 1, 2, 0, 1], np.float32))


@pytest.fixture(scope="module", params=[*NAMES, *MIXED])
def policy(request: pytest.FixtureRequest) -> Algorithm:
    made = composed(*MIXED.get(request.param, (request.param,)))
    return Parted(made.config) if request.param == "gdpo" else made


@pytest.mark.parametrize("check", CHECKS)
def test_a_preset_passes_the_kit(policy: Algorithm, plain: Batch, check: str) -> None:
    if check == "equal tokens" and policy.config.covariance_low:
        pytest.skip("it takes the gradient from some tokens")
    backends = {backend.name: backend for backend in plugin.coupler_backends()}
    subject = Subject(backends[policy.config.name], vars(policy.config))

    given = {"algorithm_subject": subject, "algorithm": policy, "plain": plain}
    takes = signature(CHECKS[check]).parameters
    CHECKS[check](**{name: value for name, value in given.items() if name in takes})
