"""Prove at setup, on a few tokens, that packed log-probs are the model's own."""

from __future__ import annotations

import numpy as np
import torch

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler_engine_fsdp.model import Policy
from coupler_engine_fsdp.packing import pack

PROMPT = 3  # tokens
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.5}  # nats; a leak or another distribution is off by more


@torch.no_grad()
def check(policy: Policy, device: torch.device, compute: torch.dtype) -> None:
    """Compare packed sequences, two of one prompt, with each one on its own, through transformers' own logits.

    Finds layers that mix packed sequences (linear attention, convolutions, positions of their own), attention that is
    not causal, logits that are changed after the head, and weights that are not finite.

    Raises:
        CouplerError: they differ.
    """
    sequences = torch.arange(3 * 6).reshape(3, 6).add(10) % policy.head.out_features
    sequences[1, :PROMPT] = sequences[0, :PROMPT]
    together, _ = policy(pack(_batch(sequences), device))
    alone = []
    for sequence in sequences:
        logits = policy(pack(_batch(sequence[None, :-1]), device), logits=True).float()[PROMPT - 1 :]
        alone.append(logits.log_softmax(-1).gather(1, sequence[PROMPT:, None].to(device)).squeeze(1))
    worst = float((together - torch.cat(alone)).abs().max())
    if not worst <= _TOLERANCE[compute]:
        raise CouplerError(
            f"engine=fsdp cannot train model.path of type {policy.causal.config.model_type!r}: the log-probs of packed "
            f"sequences differ from those of each on its own by {worst:.3g} nats."
        )


def _batch(sequences: torch.Tensor) -> Batch:
    tokens = sequences.to(torch.int32).numpy()
    count, length = tokens.shape
    mask = np.tile(np.arange(length) >= PROMPT, count)
    return Batch(np.full(count, length), {"tokens": tokens.ravel(), "loss_mask": mask})
