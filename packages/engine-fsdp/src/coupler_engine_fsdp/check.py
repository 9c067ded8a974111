"""Check at setup, on a few tokens, that packed log-probs are the model's own."""

from __future__ import annotations

import numpy as np
import torch

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler_engine_fsdp.model import Policy
from coupler_engine_fsdp.packing import Packed, pack
from coupler_engine_fsdp.sequence import Peers
from coupler_engine_fsdp.value import ValueModel

PROMPT = 3
"""Tokens of a prompt in the check."""
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float8_e4m3fn: 1.0}
"""Nats. A leak, or another distribution, is off by more."""
_STATES = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float8_e4m3fn: 0.3}
"""Parts of the largest element. A leak is off by about the largest element."""


def check(
    policy: Policy | ValueModel, device: torch.device, coarsest: torch.dtype, peers: Peers
) -> None:
    """Run the model on a few tokens, as :func:`_compare` does.

    Raises:
        CouplerError: it cannot be run so, or computes something else.
    """
    # This is transformers' own boundary: a layer that needs a mask raises any of these.
    # What a device raises, as where its memory is too small, is no matter of the model.
    try:
        _compare(policy, device, coarsest, peers)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CouplerError(
            f"engine=fsdp cannot train model.path of type {policy.causal.config.model_type!r}: it "
            f"does not run on packed sequences ({type(error).__name__}: {error})."
        ) from error


@torch.no_grad()
def _compare(
    policy: Policy | ValueModel, device: torch.device, coarsest: torch.dtype, peers: Peers
) -> None:
    """Compare packed sequences, two of one prompt, with each one on its own.

    Peers split the packed ones. Those on their own are whole on every rank.

    A policy's log-probs are compared with those of transformers' own logits. A critic's
    values may still be 0, so that its hidden states are compared.

    The check finds layers that mix packed sequences (linear attention, convolutions,
    positions of their own), attention that is not causal, logits that are changed after
    the head, and weights that are not finite.

    Raises:
        CouplerError: they differ.
    """
    vocabulary = policy.causal.config.get_text_config().vocab_size
    sequences = torch.arange(3 * 6).reshape(3, 6).add(10) % vocabulary
    sequences[1, :PROMPT] = sequences[0, :PROMPT]

    if isinstance(policy, ValueModel):
        return _check_states(policy, sequences, device, _STATES[coarsest], peers)

    batch = _batch(sequences)
    packed = pack(batch, device, peers)
    together = _whole(packed, policy(packed)["logprobs"], batch, peers)
    alone = []
    for sequence in sequences:
        logits = policy(pack(_batch(sequence[None]), device), logits=True).float()[PROMPT - 1 :]
        alone.append(
            logits.log_softmax(-1).gather(1, sequence[PROMPT:, None].to(device)).squeeze(1)
        )

    worst = float((together - torch.cat(alone)).abs().max())
    if not worst <= _TOLERANCE[coarsest]:
        raise CouplerError(
            "engine=fsdp cannot train model.path of type "
            f"{policy.causal.config.model_type!r}: the log-probs of packed "
            f"sequences differ from those of each on its own by {worst:.3g} nats."
        )


def _check_states(
    policy: ValueModel,
    sequences: torch.Tensor,
    device: torch.device,
    tolerance: float,
    peers: Peers,
) -> None:
    batch = _batch(sequences)
    packed = pack(batch, device, peers)
    states = policy(packed, states=True).float()[packed.sources]
    together = _whole(packed, states, batch, peers)

    each = [
        policy(pack(_batch(s[None]), device), states=True).float()[PROMPT - 1 :] for s in sequences
    ]
    alone = torch.cat(each)

    worst = float((together - alone).abs().max() / alone.abs().max())
    if not worst <= tolerance:
        raise CouplerError(
            "engine=fsdp cannot train a critic on a model of type "
            f"{policy.causal.config.model_type!r}: the hidden "
            f"states of packed sequences differ from those of each on its own by {worst:.3g} "
            "of the largest."
        )


def _whole(packed: Packed, values: torch.Tensor, batch: Batch, peers: Peers) -> torch.Tensor:
    """Return what was computed for every token under ``loss_mask``, on any rank."""
    mask = torch.from_numpy(batch["loss_mask"]).to(values.device)
    return peers.whole(packed.spread(values, batch.num_tokens))[mask]


def _batch(sequences: torch.Tensor) -> Batch:
    tokens = sequences.to(torch.int32).numpy()
    count, length = tokens.shape
    mask = np.tile(np.arange(length) >= PROMPT, count)
    return Batch(np.full(count, length), {"tokens": tokens.ravel(), "loss_mask": mask})
