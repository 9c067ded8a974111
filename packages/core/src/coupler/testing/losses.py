"""Define the kit's losses, on NumPy arrays and torch tensors alike: engines are tested
without an algorithm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coupler.interfaces import Columns
from coupler.metrics import Metric, Metrics


def surrogate(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Compute PPO's clipped surrogate (Schulman et al. 2017, equation 7) with an
    entropy bonus and a factor per sequence.
    """
    xp = _library(out["logprobs"])
    mask = batch["loss_mask"]
    logprobs, entropy, old, advantages = (
        xp.where(mask, column, xp.zeros_like(column))
        for column in (
            out["logprobs"],
            out["entropy"],
            batch["rollout_logprobs"],
            batch["advantages"],
        )
    )
    ratio = xp.exp(logprobs - old)
    gain = xp.minimum(ratio * advantages, xp.clip(ratio, 0.8, 1.2) * advantages)
    factor = 1 + 0.5 * batch["reward"][batch["seq"]]
    clipped = (abs(ratio - 1) > 0.2) & mask
    metrics = {
        "clip_fraction": Metric(clipped.sum(), mask.sum()),
        "entropy": Metric(_detached(entropy).sum(), mask.sum()),
        "sequences": Metric(batch["num_seqs"], how="sum"),
    }

    return -(gain + 0.01 * entropy) * factor, metrics


def sequence_ratio(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Compute the unclipped loss of GSPO (arXiv 2507.18071, equations 5 and 7), in
    which every token has the ratio of its sequence. It takes torch tensors.
    """
    mask, seq = batch["loss_mask"], batch["seq"]
    old = batch["rollout_logprobs"].where(mask, 0.0)
    advantages = batch["advantages"].where(mask, 0.0)

    zeros = out["logprobs"].new_zeros(batch["num_seqs"])
    change = out["logprobs"] - old
    total = zeros.index_add(0, seq, change)
    tokens = zeros.index_add(0, seq, mask.to(zeros.dtype))
    ratio = (total / tokens.clamp(min=1)).exp()

    metrics = {
        "ratio": Metric(
            _detached(ratio).sum(),
            batch["num_seqs"],
        ),
    }
    return -advantages * ratio[seq], metrics


def value_error(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Return half the squared distance of each value from the column ``returns``, with
    a factor per sequence.
    """
    xp = _library(out["values"])
    mask = batch["loss_mask"]
    values, returns = (
        xp.where(mask, c, xp.zeros_like(c)) for c in (out["values"], batch["returns"])
    )
    factor = 1 + 0.5 * batch["reward"][batch["seq"]]
    error = (values - returns) ** 2 / 2
    return error * factor, {"value_error": Metric(_detached(error).sum(), mask.sum())}


def squares(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Combine the sum of squared probabilities with log-prob and entropy."""
    return 3 * out["sum_pi_squared"] - 0.5 * out["logprobs"] + 0.2 * out["entropy"], {}


def among(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Weigh the probabilities of the column ``top_ids`` by their places, and add the
    log-prob of the token.
    """
    p = (_library(out["logprobs"])).exp(out["top_logprobs"])
    places = 1.0 + 0 * p
    total = ((places.cumsum(1) - 2) * p).sum(1)
    return total - 0.5 * out["logprobs"], {}


def nll(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Return the negative log-prob of each token."""
    return -out["logprobs"], {}


def whole_units(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Return the negative log-prob of each token, and count the rows whose unit is not
    whole in this micro-batch.

    Column ``unit_rows`` is the number of rows in a row's unit.
    """
    unit = batch["unit"]
    here = (unit[:, None] == unit[None]).sum(1)
    return -out["logprobs"], {"broken": Metric((here != batch["unit_rows"]).sum(), how="sum")}


def pair(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Return ``-log sigmoid(h / 2)`` of each unit, in equal parts by its valid tokens.

    h sums the log-probs of its rows, each by the column ``sign`` (DPO, arXiv 2305.18290
    eq. 7, without a reference). The loss is of torch alone.
    """
    import torch

    mask = batch["loss_mask"]
    seq = batch["seq"]
    names, of_row = torch.unique(batch["unit"], return_inverse=True)
    of_token = of_row[seq]
    sign = batch["sign"][seq]
    signed = torch.where(
        mask,
        sign * out["logprobs"],
        0.0,
    )

    zeros = signed.new_zeros(len(names))
    margin = zeros.index_add(0, of_token, signed)
    valid = zeros.index_add(0, of_token, mask.to(zeros.dtype)).clamp(min=1)
    loss = torch.nn.functional.softplus(-margin / 2) / valid
    return loss[of_token], {}


def sloped(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Return the log-prob of each token times the column ``slope`` of its sequence."""
    return batch["slope"][batch["seq"]] * out["logprobs"], {}


def not_finite(out: Columns, batch: Columns) -> tuple[Any, Metrics]:
    """Return NaN on valid tokens, as an overflow in a kernel would."""
    return out["logprobs"] * float("nan"), {}


def _library(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def _detached(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.detach()
