"""Define the objective of a run, and the coefficients that it adapts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from coupler.batch import Batch
from coupler.interfaces.engine import Columns, Output
from coupler.metrics import Metrics


class Aggregation(StrEnum):
    """The weight of a token in the loss of a step.

    Core turns it into the column ``loss_weight``.
    """

    # 1 / valid tokens of the mini-batch
    TOKEN_MEAN = "token_mean"
    # 1 / (sequences * valid tokens of the sequence)
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"
    # 1 / sequences
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"
    # 1 / (sequences * algorithm.constant)
    CONSTANT = "constant"


class Algorithm(ABC):
    """The objective of a run: it adds columns to a batch and computes a loss from them.

    It owns no process and keeps no state between steps.

    Attributes:
        needs: columns that core adds before :meth:`advantages`: ``ref_logprobs``,
            ``old_logprobs``, ``sum_pi_squared``, ``values``, ``teacher_logprobs``,
            ``teacher_top_logprobs`` [T, k] of the teacher's most likely ids, for which
            ``want`` gives the policy's as ``top_logprobs``,
            ``greedy_reward`` [B] of a greedy episode of the prompt, ``data_source`` [B]
            text of the row, ``demonstration`` [B] true where the completion is the
            answer of the row, ``turn`` [T] the number of a token's turn in its episode,
            ``anchor`` [T] a digest of what that turn was shown. No loss gets the last
            two, which are -1 where nothing was sampled. With one optimizer step per
            batch the loss gets no ``old_logprobs``, because they equal the current
            ones. It uses its own without gradient, and core spares the forward pass.
        always: columns of ``needs`` that :meth:`advantages` or the controller reads.
            Core computes ``old_logprobs`` for them with one optimizer step per batch
            too.
        want: model outputs the loss reads.
        whole_units: whether the loss of a row may read the other rows of its ``unit``,
            such as those of one trajectory. Engines then keep them in one micro-batch,
            which all of them have to fit in. False spares them that.
        aggregation: how token losses add up.
        constant: divisor per sequence under ``Aggregation.CONSTANT``.
        components: token columns with the coefficients of the parts of a loss, which
            :meth:`advantages` adds. Core divides each as ``aggregation`` says, over its
            tokens that are not 0, and ``loss_weight`` is 1.
        critic: where ``values`` is needed, the loss that the critic trains with:
            ``package.module:Class`` of an Algorithm that wants ``Output("values")``. It
            gets the same config, and reads what :meth:`advantages` added.
    """

    needs: frozenset[str] = frozenset()
    always: frozenset[str] = frozenset()
    want: tuple[Output, ...] = (Output("logprobs"),)
    whole_units: bool = True
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: int = 1
    components: tuple[str, ...] = ()
    critic: str = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def advantages(self, batch: Batch) -> Batch:
        """Add the token column ``advantages``, and others that the loss reads.

        Core calls it on the controller, with NumPy columns.
        """

    @abstractmethod
    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return losses per token ``[T]``, not normalised, and metrics.

        An engine calls it with columns of its tensor library.
        """

    def keep(self, group: Batch) -> bool:
        """Return False to reject a scored prompt group (dynamic sampling).

        Core then asks for another one.
        """
        return True

    def num_sampled(self, data_source: str, samples: int, draw: float) -> int:
        """Return how many of the ``samples`` of a prompt the policy samples.

        Below ``samples`` the answer of the row stands for the others, as one row of the
        batch. Core asks where :attr:`needs` has ``demonstration``.

        Args:
            data_source: that of the prompt's row.
            draw: a number of the prompt group, uniform over [0, 1).
        """
        return samples

    def controller(self) -> Controller | None:
        """Return a new controller, if this algorithm adapts a coefficient."""
        return None


class Controller(ABC):
    """A coefficient that follows a measurement from step to step.

    The trainer owns it, and a checkpoint holds its state.
    """

    @abstractmethod
    def apply(self, batch: Batch) -> Batch:
        """Add the current coefficients as sequence columns.

        The algorithm's ``advantages`` and ``loss`` read them.
        """

    @abstractmethod
    def update(self, batch: Batch) -> Metrics:
        """Learn from a batch with every needed column, and return the measurement and
        the coefficients that were in force.
        """

    @abstractmethod
    def state(self) -> dict[str, float]:
        """Return everything that :meth:`restore` needs, as plain JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a result of :meth:`state`."""
