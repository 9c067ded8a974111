"""Define what users set under ``algorithm`` for preferences and reward models.

This module imports nothing heavy: core reads it before a backend is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PairLoss(StrEnum):
    """Choose the loss of a preference pair.

    :func:`coupler_algos.preference_losses.of_margin` has each.
    """

    SIGMOID = "sigmoid"
    """DPO (arXiv 2305.18290) eq. 7."""
    IPO = "ipo"
    """IPO (arXiv 2310.12036) eq. 17."""
    HINGE = "hinge"
    """SLiC's margin loss, as in RSO (arXiv 2309.06657) eq. 11."""


@dataclass
class DPOConfig:
    """Configure direct preference optimization, for ``algorithm=dpo``."""

    name: str = "dpo"
    """The algorithm's name, chosen by algorithm=NAME."""
    beta: float = 0.1
    """The strength of the pull to the reference policy. A smaller one lets the policy
    move farther."""
    loss: PairLoss = PairLoss.SIGMOID
    """The loss of a pair by its margin: sigmoid (DPO), ipo or hinge."""
    label_smoothing: float = 0.0
    """The share of pairs whose preference is taken to be swapped, for loss=sigmoid
    (conservative DPO). 0 trusts every pair."""
    length_normalised: bool = False
    """Take the mean log-prob of a completion's tokens in place of their sum."""
    reference_free: bool = False
    """Take a uniform reference: no reference model is run."""
    sft_coef: float = 0.0
    """The weight of the chosen completion's mean negative log-likelihood, which is
    added to the loss of a pair. 0 adds none."""

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that core adds (``Algorithm.needs``)."""
        return frozenset(() if self.reference_free else {"ref_logprobs"})


@dataclass
class OnlineDPOConfig(DPOConfig):
    """Configure DPO on pairs of samples (arXiv 2402.04792), for
    ``algorithm=online_dpo``.
    """

    name: str = "online_dpo"
    """The algorithm's name, chosen by algorithm=NAME."""


@dataclass
class KTOConfig:
    """Configure KTO (arXiv 2402.01306), for ``algorithm=kto``."""

    name: str = "kto"
    """The algorithm's name, chosen by algorithm=NAME."""
    beta: float = 0.1
    """The strength of the pull to the reference policy. A smaller one lets the policy
    move farther."""
    desirable_weight: float = 1.0
    """The weight of rows whose label is true."""
    undesirable_weight: float = 1.0
    """The weight of rows whose label is false."""

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that core adds (``Algorithm.needs``)."""
        return frozenset({"ref_logprobs", "old_logprobs"})


@dataclass
class RewardModelConfig:
    """Configure Bradley-Terry reward models, for ``algorithm=reward_model``."""

    name: str = "reward_model"
    """The algorithm's name, chosen by algorithm=NAME."""
    centering_coef: float = 0.0
    """The weight of the squared sum of both scores of a pair, which keeps scores near
    0. 0 adds nothing, and scores have no fixed origin."""
