"""Algorithm: what to optimise. Controller: what it adapts from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from coupler.batch import Batch
from coupler.interfaces.engine import Columns, Output
from coupler.metrics import Metrics


class Aggregation(StrEnum):
    """How token losses add up to the loss of a step. Core turns it into the column ``loss_weight``."""

    TOKEN_MEAN = "token_mean"  # 1 / valid tokens of the mini-batch
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"  # 1 / (sequences * valid tokens of the sequence)
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"  # 1 / sequences
    CONSTANT = "constant"  # 1 / (sequences * algorithm.constant)


class Algorithm(ABC):
    """What to optimise: data in, columns and a loss out. Owns no process and keeps no state between steps.

    Attributes:
        needs: columns that core adds before :meth:`advantages`: ``ref_logprobs``,
            ``old_logprobs``, ``values``. The loss gets no ``old_logprobs`` where they equal
            the current ones (one optimizer step per batch): it then uses its own log-probs
            without gradient, and core spares the forward pass.
        always: columns of ``needs`` that :meth:`advantages` or the controller reads. Core
            computes ``old_logprobs`` for them with one optimizer step per batch too.
        want: model outputs the loss reads.
        aggregation: how token losses add up.
        constant: divisor per sequence under ``Aggregation.CONSTANT``.
        critic: where ``values`` is needed, the loss that the critic trains with: ``package.module:Class`` of an
            Algorithm that wants ``Output("values")``. It gets the same config, and reads what :meth:`advantages` added.
    """

    needs: frozenset[str] = frozenset()
    always: frozenset[str] = frozenset()
    want: tuple[Output, ...] = (Output("logprobs"),)
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: int = 1
    critic: str = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def advantages(self, batch: Batch) -> Batch:
        """Add the token column ``advantages`` (and what else the loss reads). On the controller, in NumPy."""

    @abstractmethod
    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return losses per token ``[T]``, not normalised, and metrics. In the engine, in its tensor library."""

    def keep(self, group: Batch) -> bool:
        """Return False to reject a scored prompt group (dynamic sampling): core then asks for another."""
        return True

    def controller(self) -> Controller | None:
        """Return a new controller of what this algorithm adapts from step to step, if there is anything."""
        return None


class Controller(ABC):
    """A coefficient that follows a measurement from step to step. The trainer owns it, and a checkpoint holds it."""

    @abstractmethod
    def apply(self, batch: Batch) -> Batch:
        """Add the sequence columns that hold what is in force, for the algorithm's ``advantages`` and ``loss``."""

    @abstractmethod
    def update(self, batch: Batch) -> Metrics:
        """Learn from a batch with every needed column, and say what was measured and in force."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """Everything that :meth:`restore` needs; plain JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what :meth:`state` returned."""
