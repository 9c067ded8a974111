"""Compare the log-probs of engine and rollout inside the loss of every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from coupler.errors import CouplerError
from coupler.interfaces import Algorithm, Columns, Loss
from coupler.metrics import Metric, Metrics

# the beginning of a metric's name, which the number of a replica ends
OF_REPLICA = "train_infer/abs_diff_of_replica_"
SURPRISE_OF = "sampling/surprise_of_replica_"
VARIANCE_OF = "sampling/variance_of_replica_"


def checked_loss(algorithm: Algorithm, fresh_version: int | None, num_replicas: int = 1) -> Loss:
    """Wrap an algorithm's loss to check its shape and to compare train with inference.

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
                "  return losses that are not summed or averaged: core normalises them by "
                "algorithm.aggregation"
            )

        total = Metric((_detached(token_loss) * weight).sum(), how="sum")
        return token_loss, {
            "loss": total,
            **metrics,
            **mismatch(out, batch, fresh_version, num_replicas),
            **surprise(out, batch, fresh_version, num_replicas),
        }

    return loss


def mismatch(
    out: Columns, batch: Columns, fresh_version: int | None, num_replicas: int = 1
) -> Metrics:
    """Compare the log-probs of engine and rollout on tokens that the current weights
    sampled.

    This is the probe of a sync. Several replicas are compared one by one too, because a
    wrong one hardly moves the mean of many.
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


def surprise(
    out: Columns, batch: Columns, fresh_version: int | None, num_replicas: int = 1
) -> Metrics:
    """Compare how surprising the sampled tokens are with the entropy that the engine
    computes for their positions.

    ``x = -log p - H`` has mean 0 if a token is sampled from the distribution p whose
    entropy is H, whatever p is. The sums feed :class:`SamplingCheck`. There are none
    where the algorithm wants no entropy.
    """
    if fresh_version is None or "rollout_logprobs" not in batch or "entropy" not in out:
        return {}
    # nothing sampled a token of a demonstration, which has no version
    mask, entropy = batch["loss_mask"] & (batch["version"] >= 0), _detached(out["entropy"])
    logprobs = _detached(out["logprobs"])
    x = (-logprobs - entropy) * mask
    diff = (logprobs - batch["rollout_logprobs"]) * mask
    count, square = mask.sum(), x * x
    found = {
        "sampling/surprise": Metric(x.sum(), count),
        "sampling/variance": Metric(square.sum(), count),
        "sampling/square_max": _most(square),
        "sampling/entropy": Metric((entropy * mask).sum(), count),
        # k3, as in differences(), but over stale tokens too
        "sampling/kl": Metric(abs(np.e**diff - 1 - diff).sum(), count),
    }

    if num_replicas > 1:
        sampled_by = batch["replica"][batch["seq"]]
        for replica in range(num_replicas):
            mine = mask & (sampled_by == replica)
            found[f"{SURPRISE_OF}{replica}"] = Metric((x * mine).sum(), mine.sum())
            found[f"{VARIANCE_OF}{replica}"] = Metric((square * mine).sum(), mine.sum())
    return found


def differences(diff: Any, count: Any, counts: Any = 1) -> Metrics:
    """Return ``train_infer/*`` of ``diff``, the log of ``r = train / infer`` [T].

    ``train_infer/ratio`` is the mean of r, whose expectation under the rollout's
    distribution is 1 where both are over the same tokens. ``train_infer/kl`` estimates
    KL(infer || train) per token by ``r - 1 - log r`` (Schulman 2020, "Approximating KL
    divergence", k3), in nats.

    Args:
        count: number of tokens.
        counts: [T] True at these tokens. ``diff`` is 0 at the others.
    """
    ratio = np.e**diff
    return {
        # k3 >= 0 but for rounding
        "train_infer/kl": Metric(abs(ratio - 1 - diff).sum(), count),
        "train_infer/ratio": Metric((ratio * counts).sum(), count),
        "train_infer/ratio_max": _most(ratio * counts),
        "train_infer/abs_diff": Metric(abs(diff).sum(), count),
        "train_infer/abs_diff_max": _most(abs(diff)),
    }


def _most(column: Any) -> Metric:
    return Metric(column.max() if len(column) else 0.0, how="max")


def _detached(tensor: Any) -> Any:
    return tensor if isinstance(tensor, np.ndarray) else tensor.detach()
