"""Wrap a loss so that every step compares the log-probs of engine and rollout."""

from __future__ import annotations

from typing import Any

import numpy as np

from coupler.errors import CouplerError
from coupler.interfaces import (
    Algorithm,
    Columns,
    Loss,
)
from coupler.metrics import Metric, Metrics

OF_REPLICA = "train_infer/abs_diff_of_replica_"  # and its number


def checked_loss(algorithm: Algorithm, fresh_version: int | None, num_replicas: int = 1) -> Loss:
    """Wrap an algorithm's loss: refuse what is not one loss per token, and measure train against inference.

    Raises (in the engine):
        CouplerError: the loss is a scalar, or has another shape than ``[T]``.
    """

    def loss(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        token_loss, metrics = algorithm.loss(out, batch)
        weight = batch["loss_weight"]
        if tuple(token_loss.shape) != tuple(weight.shape):
            raise CouplerError(
                f"the loss of {type(algorithm).__name__} has shape {list(token_loss.shape)}, "
                f"expected one loss per token, {list(weight.shape)}.\n"
                "  return losses that are not summed or averaged: core normalises them by algorithm.aggregation"
            )
        total = Metric((_detached(token_loss) * weight).sum(), how="sum")
        return token_loss, {"loss": total, **metrics, **mismatch(out, batch, fresh_version, num_replicas)}

    return loss


def mismatch(out: Columns, batch: Columns, fresh_version: int | None, num_replicas: int = 1) -> Metrics:
    """Compare the log-probs of engine and rollout on tokens that the current weights sampled: the probe of a sync.

    Where several replicas sampled, also for each: one that is wrong hardly moves the mean of many.
    """
    if fresh_version is None or "rollout_logprobs" not in batch:
        return {}
    fresh = (batch["version"] == fresh_version) & batch["loss_mask"]
    diff = (_detached(out["logprobs"]) - batch["rollout_logprobs"]) * fresh
    found = differences(diff, fresh.sum(), fresh)
    if num_replicas > 1:
        sampled_by = batch["replica"][batch["seq"]]
        for replica in range(num_replicas):
            mine = fresh & (sampled_by == replica)
            found[f"{OF_REPLICA}{replica}"] = Metric(abs(diff * mine).sum(), mine.sum())
    return found


def differences(diff: Any, count: Any, counts: Any = 1) -> Metrics:
    """What ``train_infer/*`` say of ``diff``, the log of ``r = train / infer`` [T], over ``count`` tokens.

    ``train_infer/ratio`` is the mean of r, whose expectation under the rollout's distribution is 1 where both are over
    the same tokens; ``train_infer/kl`` estimates KL(infer || train) per token by ``r - 1 - log r`` (Schulman 2020,
    "Approximating KL divergence", k3), in nats.

    Args:
        counts: [T] which tokens these are; ``diff`` is 0 for the others.
    """
    ratio = np.e**diff
    return {
        "train_infer/kl": Metric(abs(ratio - 1 - diff).sum(), count),  # k3 >= 0 but for rounding
        "train_infer/ratio": Metric((ratio * counts).sum(), count),
        "train_infer/ratio_max": _most(ratio * counts),
        "train_infer/abs_diff": Metric(abs(diff).sum(), count),
        "train_infer/abs_diff_max": _most(abs(diff)),
    }


def _most(column: Any) -> Metric:
    return Metric(column.max() if len(column) else 0.0, how="max")


def _detached(tensor: Any) -> Any:
    return tensor if isinstance(tensor, np.ndarray) else tensor.detach()
