"""Find problems of the configuration of preference algorithms before a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coupler_algos.preference_config import (
    DPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PairLoss,
    RewardModelConfig,
)

if TYPE_CHECKING:
    from coupler import RunConfig


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one sentence per problem, with key and fix."""
    if isinstance(config.algorithm, OnlineDPOConfig) and config.samples_per_prompt < 2:
        yield (
            f"samples_per_prompt={config.samples_per_prompt} makes no pair of a prompt's samples: "
            "set samples_per_prompt=2 or more."
        )
    steps, pairs = config.optimizer_steps_per_batch, config.prompts_per_step
    if isinstance(config.algorithm, OnlineDPOConfig) and steps > pairs:
        yield (
            f"optimizer_steps_per_batch={steps} leaves steps without a pair, since a batch has one "
            f"of each prompt: set it to prompts_per_step={pairs} or less."
        )

    match config.algorithm:
        case DPOConfig() as algorithm:
            yield from _of_dpo(algorithm)
        case KTOConfig() as algorithm:
            yield from _of_kto(config, algorithm)
        case RewardModelConfig(centering_coef=coefficient) if coefficient < 0:
            yield (
                f"algorithm.centering_coef={coefficient} must not be negative: 0 switches it off."
            )
        case _:
            pass


def _of_dpo(a: DPOConfig) -> Iterator[str]:
    yield from _positive_beta(a.beta)
    if not 0 <= a.label_smoothing < 0.5:
        yield (
            f"algorithm.label_smoothing={a.label_smoothing} must be at least 0 and below 0.5, "
            "where both orders of a pair are as likely."
        )

    elif a.label_smoothing and a.loss is not PairLoss.SIGMOID:
        yield (
            f"algorithm.label_smoothing={a.label_smoothing} belongs to algorithm.loss=sigmoid "
            f"and does nothing with {a.loss}: set one of them back."
        )

    if a.sft_coef < 0:
        yield f"algorithm.sft_coef={a.sft_coef} must not be negative: 0 switches it off."


def _of_kto(config: RunConfig, a: KTOConfig) -> Iterator[str]:
    yield from _positive_beta(a.beta)
    for key in ("desirable_weight", "undesirable_weight"):
        if getattr(a, key) < 0:
            yield f"algorithm.{key}={getattr(a, key)} must not be negative; 1 is usual."
    if config.prompts_per_step < 2:
        yield (
            f"prompts_per_step={config.prompts_per_step} leaves algorithm=kto no other row to "
            "estimate its reference point with: set prompts_per_step=2 or more."
        )


def _positive_beta(beta: float) -> Iterator[str]:
    if beta <= 0:
        yield f"algorithm.beta={beta} must be above 0; 0.1 is usual."
