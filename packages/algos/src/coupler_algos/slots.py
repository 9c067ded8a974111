"""Name what may fill each slot of the policy gradient: ratio, shape, baseline and
correction.

This module imports nothing heavy: core reads it before a backend is chosen.
"""

from __future__ import annotations

from enum import StrEnum


class Ratio(StrEnum):
    """Choose what one ratio of probabilities is of."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """The product over the tokens that a trajectory sampled, in all of its rows."""
    GEOMETRIC = "geometric"
    """The geometric mean over them: GSPO (arXiv 2507.18071) eq. 7."""


class Shape(StrEnum):
    """Choose how ratio and advantage become a loss.

    :mod:`coupler_algos.shapes` has each.
    """

    CLIP = "clip"
    """PPO's: arXiv 1707.06347 eq. 7."""
    CLIP_TOKENS = "clip_tokens"
    """GMPO's, which clips tokens before it multiplies them: arXiv 2507.20673."""
    DETACHED_CLIP = "detached_clip"
    """CISPO's: arXiv 2506.13585 eq. 4."""
    GATE = "gate"
    """SAPO's: arXiv 2511.20347."""
    TV_MASK = "tv_mask"
    """DPPO's, by the difference of probabilities: arXiv 2602.04879."""
    TAPER = "taper"
    """TOPR's: arXiv 2503.14286."""
    GAMMA_KERNEL = "gamma_kernel"
    """VESPO's: arXiv 2602.10693."""
    LIKELIHOOD = "likelihood"
    """GPG's, without a ratio: arXiv 2504.02546."""

    @property
    def by_token(self) -> bool:
        """Return whether a token's loss has its own log-prob as a factor, so that one
        ratio per sequence does not repeat the loss on each token.
        """
        return self in (Shape.DETACHED_CLIP, Shape.TAPER, Shape.GAMMA_KERNEL, Shape.LIKELIHOOD)

    @property
    def clips(self) -> bool:
        """Return whether ``clip_low`` and ``clip_high`` mean something."""
        return self not in (Shape.GATE, Shape.TAPER, Shape.GAMMA_KERNEL, Shape.LIKELIHOOD)


class Correction(StrEnum):
    """Choose what becomes of a weight w = recomputed / rollout probability."""

    TRUNCATE = "truncate"
    """min(w, cap): arXiv 1802.01561."""
    MASK = "mask"
    """w between floor and cap, and 0 outside: IcePop (arXiv 2510.18855)."""


class Baseline(StrEnum):
    """Choose what GRPO subtracts from a reward."""

    MEAN = "mean"
    """The mean of the prompt's group."""
    LENGTH_WEIGHTED = "length_weighted"
    """The mean of the group, weighted by sampled tokens: OPO (arXiv 2505.23585)."""
    SECOND_BEST = "second_best"
    """The second best reward of the group, from the best. The others get 0: the best of
    k samples, leave one out (arXiv 2503.19595)."""
    GREEDY = "greedy"
    """The reward of a greedy episode of the prompt: ReMax (arXiv 2310.10505)."""
    OPTIMAL_TOKEN = "optimal_token"
    """A baseline for each position, weighted by the squared gradients of all samples
    up to it: OTB (arXiv 2602.07078)."""
    MOVING_MEAN = "moving_mean"
    """The moving mean of rewards of the row's data_source: RAE (arXiv 2506.24119)."""
    NONE = "none"
    """Nothing."""

    @property
    def compares(self) -> bool:
        """Return whether it takes another sample of the prompt."""
        return self not in (
            Baseline.GREEDY,
            Baseline.MOVING_MEAN,
            Baseline.NONE,
        )


class Level(StrEnum):
    """Choose how the divergences of tokens are joined before ``reject`` judges them."""

    TOKEN = "token"
    SUM = "sequence_sum"
    MEAN = "sequence_mean"
    MAX = "sequence_max"


BINARY = "binary"
"""The divergence of two coins that stand for a token (:func:`corrections.binary`)."""
DIVERGENCES = (
    "k1",
    "k2",
    "k3",
    BINARY,
)
REJECTIONS = tuple(f"{level}_{kind}" for level in Level for kind in DIVERGENCES)
"""The keys of ``algorithm.reject``: arXiv 2512.23075, and KPop for binary."""
