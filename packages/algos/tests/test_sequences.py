"""A sequence is a trajectory: k sibling rows train as one row does, under every option
that reads sequences, in any order and in micro-batches.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from composed_presets import algorithm
from test_sibling_rows import by_token, of_one_row_each, of_several_rows

from coupler.batch import Batch
from coupler.engine_kit.micro_batches import split
from coupler.interfaces import Algorithm
from coupler.loop.loss_weight import prepare
from coupler.metrics import merge, values
from coupler.testing.reference import torch_columns
from coupler_algos.slots import REJECTIONS

WEIGHED = ("algorithm.correction_cap=2", "algorithm.correction_ratio=sequence")
OPTIONS: dict[str, tuple[str, ...]] = {
    "gspo": ("gspo",),
    "gspo, unclipped": ("gspo", "algorithm.clip_low=0", "algorithm.clip_high=0"),
    "gmpo": ("gmpo",),
    "luspo": ("luspo", "algorithm.clip_low=0.2", "algorithm.clip_high=0.2"),
    "topr": ("topr",),
    "vespo": ("vespo",),
    "rloo": ("rloo",),
    "product": ("grpo", "algorithm.ratio=sequence"),
    "product, clipped tokens": ("grpo", "algorithm.ratio=sequence", "algorithm.shape=clip_tokens"),
    "opsm": ("grpo", "algorithm.opsm_delta=0.05"),
    "weighed": ("grpo", *WEIGHED),
    "weighed by the mean": (
        "grpo",
        "algorithm.correction_cap=1.3",
        "algorithm.correction_ratio=geometric",
    ),
    "weighed and normalised": ("grpo", *WEIGHED, "algorithm.correction_normalize=true"),
    "masked": (
        "grpo",
        *WEIGHED,
        "algorithm.correction=mask",
        "algorithm.correction_floor=0.5",
    ),
    "measured": ("grpo", "algorithm.log_mismatch=true"),
    "covariance": ("kl_cov", "algorithm.covariance_share=0.2"),
    **{key: ("grpo", f"algorithm.reject.{key}=0.3") for key in REJECTIONS if "seq" in key},
}


def trained(
    policy: Algorithm, batch: Batch, max_tokens: int
) -> tuple[dict[int, float], dict[int, float], dict[str, float]]:
    """Return gradient and weighted loss by the number of each sampled token, and the
    metrics, of one step in micro-batches.
    """
    whole = prepare(policy.advantages(batch), policy)
    grads: dict[int, float] = {}
    losses: dict[int, float] = {}
    found = []

    for rows in split(whole, max_tokens):
        part = whole.take(rows)
        near = part["rollout_logprobs"] + 0.3 * np.sin(part["tokens"].astype(float))
        now = torch.tensor(near, dtype=torch.float64, requires_grad=True)
        columns = torch_columns(part)
        loss, metrics = policy.loss({"logprobs": now}, columns)
        weighted = loss * columns["loss_weight"]
        weighted.sum().backward()

        assert now.grad is not None
        grads |= by_token(part, now.grad.numpy())
        losses |= by_token(part, weighted.detach().numpy())
        found.append(metrics)
    return grads, losses, values(merge(found))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", OPTIONS)
def test_siblings_train_as_one_row(name: str, seed: int) -> None:
    policy, rng = algorithm(*OPTIONS[name]), np.random.default_rng(seed)
    batch = of_one_row_each(rng)
    unit = batch["trajectory"]
    batch = batch.with_seqs(unit=unit)
    siblings = of_several_rows(batch, rng)
    # The log-probs stay near each other, so that not every bound is passed.
    near = {
        name: np.where(siblings["loss_mask"], -0.5 + 0.2 * siblings[name], siblings[name])
        for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs")
    }
    siblings = siblings.with_tokens(**near)
    whole = batch.with_tokens(**{k: -0.5 + 0.2 * batch[k] for k in near})

    largest = np.bincount(
        np.unique(siblings["unit"], return_inverse=True)[1], siblings.lengths
    ).max()
    want = trained(policy, whole, 10**6)
    shuffled = siblings.take(rng.permutation(len(siblings)))
    for other, size in ((siblings, 10**6), (siblings, int(largest)), (shuffled, int(largest))):
        got = trained(policy, other, size)
        for mine, true in zip(got, want, strict=True):
            assert mine == pytest.approx(true, rel=1e-6, abs=1e-6)


def test_rows_that_need_each_other_are_refused_by_name_where_they_do_not_fit() -> None:
    batch = of_one_row_each(np.random.default_rng(0))
    siblings = batch.with_seqs(unit=np.zeros(len(batch), int))
    with pytest.raises(ValueError, match=f"{len(batch)} rows that the loss reads together"):
        split(siblings, int(batch.lengths.max()))


def test_an_algorithm_of_tokens_may_split_a_trajectory() -> None:
    """GRPO's rows need to fit one by one. Those of GSPO need to fit together."""
    rng = np.random.default_rng(1)
    batch = of_one_row_each(rng)
    siblings = of_several_rows(batch.with_seqs(unit=batch["trajectory"]), rng)
    siblings = siblings.with_seqs(group=np.zeros(len(siblings), int))

    free = prepare(algorithm("grpo").advantages(siblings), algorithm("grpo"))
    bound = prepare(algorithm("gspo").advantages(siblings), algorithm("gspo"))
    assert len(np.unique(free["unit"])) == len(siblings)
    assert (bound["unit"] == siblings["trajectory"]).all()
