"""Add up the parts of a loss of which each has its own tokens, in torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from coupler.interfaces import Columns
from coupler.metrics import Metrics
from coupler_algos import kl
from coupler_algos.columns import mean
from coupler_algos.components import TAUGHT, column_of
from coupler_algos.config import KL, GroupConfig, KLEstimator
from coupler_algos.gkd import gkd_loss
from coupler_algos.losses import nll_loss, policy_loss


def mixed_loss(config: GroupConfig, out: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    """Return the sum of parts [T], each times its column of weights.

    A part is computed, and measured, over the tokens with a weight above 0. Core has
    divided the weights, and its own ``loss_weight`` is 1.
    """
    parts = {
        "rl": policy_loss,
        "ce": _ce,
        "ref": _ref,
        "teacher": _teacher,
        "demo": _demo,
        "gkd": gkd_loss,
    }
    total = torch.zeros_like(out["logprobs"])
    metrics: Metrics = {}

    for name, part in parts.items():
        if not config.has_component(name):
            continue
        given = batch[column_of(name)]
        mask = batch["loss_mask"] & (given > 0)
        weight = torch.where(mask, given, 0.0)
        mine = {
            **batch,
            "loss_mask": mask,
        }
        loss, found = part(
            config,
            out,
            mine,
        )
        total = total + weight * loss
        metrics |= found
    return total, metrics


def _ce(_: GroupConfig, out: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    return nll_loss(out, batch)


def _demo(_: GroupConfig, out: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    loss, metrics = nll_loss(out, batch)
    return loss, {"nll_demo": metrics["nll"]}


def _ref(config: GroupConfig, out: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    """Return the estimate of the divergence from the reference [T], in nats.

    The metric is k3, as that of ``algorithm.kl`` is.
    """
    mask = batch["loss_mask"]
    logprobs = torch.where(mask, out["logprobs"], 0.0)
    reference = torch.where(mask, batch["ref_logprobs"], 0.0)

    loss = kl.estimate(
        config.kl_estimator,
        logprobs,
        reference,
        torch,
    )
    measured = kl.estimate(
        KLEstimator.K3,
        logprobs.detach(),
        reference,
        torch,
    )
    return loss, {"kl_ref": mean(measured, mask)}


def _teacher(config: GroupConfig, out: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    """Return the surrogate of the teacher's advantages [T], as rewards have theirs.

    What holds the policy near others belongs to the part ``rl``.
    """
    alone = replace(
        config,
        teacher_coef=1.0,
        kl=KL.NONE,
        proximal_coef=0.0,
        entropy_coef=0.0,
    )

    advised = {
        **batch,
        "advantages": batch[TAUGHT],
    }
    loss, metrics = policy_loss(
        alone,
        {"logprobs": out["logprobs"]},
        advised,
    )
    return loss, {"kl_teacher": metrics["kl_teacher"]}
