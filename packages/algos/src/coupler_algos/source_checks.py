"""Find problems of ``algorithm.sources`` before a run."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Any

from coupler_algos.components import NAMES
from coupler_algos.config import KL, REWARDED, GroupConfig, KLEstimator
from coupler_algos.slots import Ratio

if TYPE_CHECKING:
    from coupler import RunConfig


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one sentence per problem, with key and fix."""
    algorithm = config.algorithm
    if not isinstance(algorithm, GroupConfig):
        return
    if algorithm.ce_above and not algorithm.has_component("ce"):
        yield (
            f"algorithm.ce_above={algorithm.ce_above} chooses samples for ce, which no source of "
            "algorithm.sources has: set it to 0."
        )

    yield from _gkd(algorithm)
    if algorithm.sources:
        yield from _parts(algorithm.sources)
        yield from _others(algorithm)
        yield from _shown(config, algorithm)


def _parts(sources: dict[str, Any]) -> Iterator[str]:
    for source, parts in sources.items():
        key = f"algorithm.sources.{source}"
        if not isinstance(parts, dict) or not parts:
            yield f"{key} takes the weights of parts of the loss: set it to {{rl: 1}}, say."
            continue

        for name, weight in parts.items():
            if name not in NAMES:
                yield f"{key}.{name} is no part of the loss: set one of {', '.join(NAMES)}."
            elif type(weight) not in (int, float) or not isfinite(weight) or weight <= 0:
                yield f"{key}.{name}={weight} must be a number above 0, or left out."


def _shown(config: RunConfig, a: GroupConfig) -> Iterator[str]:
    """Yield the sources in which an answer leaves too few samples."""
    for source, parts in a.sources.items():
        if not isinstance(parts, dict) or "demo" not in parts or len(parts) == 1:
            continue

        least = 3 if "rl" in parts and a.compares else 2
        if config.samples_per_prompt < least:
            yield (
                f"samples_per_prompt={config.samples_per_prompt} is too few for "
                f"algorithm.sources.{source}, in which an answer takes the place of one sample: "
                f"set samples_per_prompt={least} or more."
            )


def _gkd(a: GroupConfig) -> Iterator[str]:
    for name in ("gkd_beta", "gkd_lambda"):
        if not 0 <= getattr(a, name) <= 1:
            yield f"algorithm.{name}={getattr(a, name)} must be between 0 and 1."
        default = {"gkd_beta": 0, "gkd_lambda": 1}[name]
        if getattr(a, name) != default and not a.has_component("gkd"):
            yield (
                f"algorithm.{name}={getattr(a, name)} is of the part gkd, which no source of "
                f"algorithm.sources has: set it to {default}, or choose algorithm=gkd."
            )


def _others(a: GroupConfig) -> Iterator[str]:
    if a.teacher_coef or a.reward_coef != 1:
        yield (
            "algorithm.sources gives teacher and rl their weights, and algorithm.teacher_coef and "
            "reward_coef do so too: set these to 0 and 1."
        )
    if a.kl is KL.IN_LOSS:
        yield (
            "algorithm.sources weighs the reference by its part ref, and algorithm.kl=in_loss "
            "would count it twice: set algorithm.kl=none."
        )
    if a.kl in REWARDED and not a.has_component("rl"):
        yield (
            f"algorithm.kl={a.kl} changes rewards, and no source of algorithm.sources has the part "
            "rl, which learns from them: set algorithm.kl=none."
        )

    if a.has_component("ref") and a.kl_estimator is KLEstimator.K1:
        yield (
            "algorithm.kl_estimator=k1 has a gradient of zero expectation in the part ref of "
            "algorithm.sources: set algorithm.kl_estimator=k2 or k3."
        )
    if a.has_component("teacher") and a.ratio is Ratio.SEQUENCE:
        yield (
            "algorithm.ratio=sequence needs one advantage for all tokens of a sequence, and the "
            "part teacher of algorithm.sources has one for each: set algorithm.ratio=token."
        )
    if a.covariance_share or a.second_moment:
        yield (
            "algorithm.covariance_share and second_moment judge a batch by the advantages of one "
            "loss, and algorithm.sources has several: set them to 0."
        )
