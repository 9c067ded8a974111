"""Sample tokens with one uniform number each, from a counter.

The numbers of a request do not depend on the requests beside it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 numbers with the finaliser of SplitMix64.

    It is that of Steele, Lea and Flood, 2014, figure 15.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_starts(seeds: list[int]) -> np.ndarray:
    """Return the start of each request's stream on SplitMix64's cycle, [n] uint64.

    Neighbouring seeds land far apart.
    """
    return mix(np.array([(seed ^ GAMMA) & MASK for seed in seeds], np.uint64))


def uniforms(starts: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return uniform numbers in (0, 1], [..., n] float64.

    Number ``i`` has index ``index[..., i]`` (uint64) in the stream that starts at
    ``starts[i]``.
    """
    bits = mix(starts + (index + np.uint64(1)) * np.uint64(GAMMA))
    return ((bits >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53


def cut(logprobs: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the ``top_k`` most likely tokens of each row, and of these the fewest that
    have ``top_p`` of their probability together.

    See arXiv 1904.09751, section 3.1.

    Args:
        logprobs: [n, V] float32.
        top_k: [n, 1] int64 in [1, V].
        top_p: [n, 1] float64, in (0, 1) or infinite for all.

    Returns:
        [n, V] log-probs among the tokens that are left, -inf for the others, and [n, K]
        ids, those that are left first, K being the largest ``top_k``.
    """
    ordered, order = logprobs.topk(int(top_k.max()))
    ordered.masked_fill_(torch.arange(ordered.shape[1], device=order.device) >= top_k, -torch.inf)
    mass = ordered.double().softmax(-1)
    # The first token always stays: the left side is 0 for it.
    ordered.masked_fill_(mass.cumsum(-1) - mass >= top_p, -torch.inf)
    left = torch.full_like(logprobs, -torch.inf)
    left.scatter_(1, order, ordered.log_softmax(-1))
    return left, order.masked_fill(ordered.isneginf(), -1)


def sample(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logprobs: [n, V] float32.
        uniform: [n] float64 in (0, 1]. A number above 0 never lands on a token of
            probability 0.

    Returns:
        [n] int64.
    """
    # In float32 the tail of a large vocabulary would vanish.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:])[:, 0]

    # For a row of NaN, V is drawn.
    return drawn.clamp_(max=logprobs.shape[1] - 1)
