"""Announce ``algorithm=judged``: REINFORCE with a critic, for the toy backends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from coupler.batch import Batch
from coupler.interfaces import Algorithm, Columns, Output
from coupler.metrics import Metrics
from coupler.plugins import Backend, hookimpl
from coupler.testing.toy import ToyAlgorithm
from coupler.testing.toy_config import ToyAlgorithmConfig


@dataclass
class JudgedConfig(ToyAlgorithmConfig):
    """Options of the judged algorithm."""

    name: str = "judged"


class Squares(Algorithm):
    """Half the squared distance of values from returns."""

    want = (Output("values"),)

    def advantages(self, batch: Batch) -> Batch:
        return batch

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        return (out["values"] - batch["returns"]) ** 2 / 2, {}


class Judged(ToyAlgorithm):
    """REINFORCE with the reward minus the critic's value as advantage."""

    needs = frozenset({"values"})
    critic = "tests.faults.toy_critic:Squares"

    def advantages(self, batch: Batch) -> Batch:
        reward = batch.spread(batch["reward"])
        return batch.with_tokens(advantages=reward - batch["values"], returns=reward)


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind="algorithm",
        name="judged",
        target="tests.faults.toy_critic:Judged",
        config=JudgedConfig,
        capabilities=frozenset({"model:toy", "needs:values"}),
    )
