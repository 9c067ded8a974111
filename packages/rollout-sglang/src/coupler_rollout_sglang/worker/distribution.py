"""Cut a distribution over tokens, and sample from it."""

from __future__ import annotations

import torch


def kept(
    logprobs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave the ``top_k`` most likely tokens of each row, and of these the fewest that
    together have ``top_p`` of their probability.

    Returns:
        [rows, tokens] log-probs, of which what is left adds up to 1 again, and as many
        ids, those that are left first, and -1 behind them.
    """
    top_ks = top_ks.view(-1, 1)
    top_ps = top_ps.view(-1, 1)
    ordered, order = logprobs.sort(dim=-1, descending=True)
    count = logprobs.shape[-1]
    places = torch.arange(count, device=logprobs.device)
    ordered.masked_fill_(places >= top_ks, -torch.inf)

    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    beyond = (before >= top_ps) & (top_ps < 1)
    ordered.masked_fill_(beyond, -torch.inf)
    left = torch.empty_like(logprobs).scatter_(-1, order, ordered)
    whole = (top_ps >= 1) & (top_ks >= count)
    renormalised = torch.log_softmax(left, dim=-1)
    ids = order.masked_fill(ordered.isneginf(), -1)
    return torch.where(whole, logprobs, renormalised), ids


def sample(logprobs: torch.Tensor) -> torch.Tensor:
    """Sample a token of each row from the process's random numbers, [rows]."""
    noise = torch.empty_like(logprobs).exponential_()
    return (logprobs.exp() / noise.clamp_min_(torch.finfo(noise.dtype).tiny)).argmax(-1)


def sample_on_cpu(
    logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Sample a token of each row by its seed and position, [rows].

    ``fused.py`` has this for GPUs, with other random numbers.
    """
    noise = torch.empty_like(logprobs, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed, position in zip(noise, seeds.tolist(), positions.tolist(), strict=True):
        generator.manual_seed(mixed(seed, position))
        row.exponential_(generator=generator)
    return (logprobs.double() - noise.log()).argmax(-1)


def mixed(seed: int, position: int) -> int:
    """Mix a seed and a position into 32 bits, which a generator on the CPU takes."""
    found = (seed + 0x9E3779B97F4A7C15 * (position + 1)) % 2**64
    found = (found ^ (found >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    found = (found ^ (found >> 27)) * 0x94D049BB133111EB % 2**64
    return (found ^ (found >> 31)) & 0xFFFFFFFF
