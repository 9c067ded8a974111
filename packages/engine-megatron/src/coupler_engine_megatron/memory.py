"""Name the tensors of an engine that leave the device together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from coupler.engine_kit.parked import Keep
from coupler.interfaces import Part
from coupler_engine_megatron.optimizer import Optimizer


def held(
    part: Part, parameters: Sequence[Tensor], optimizer: Optimizer | None
) -> dict[str, tuple[list[Tensor], Keep]]:
    """Return the tensors of a part by their kind, with what the host keeps."""
    if part is Part.PARAMS:
        return {
            "params": ([each for each in parameters if each.requires_grad], Keep.ALL),
            "frozen": ([each for each in parameters if not each.requires_grad], Keep.SAME),
        }
    if optimizer is None:
        return {}

    if part is Part.OPTIMIZER:
        return {"optimizer": ([*optimizer.states()], Keep.ALL)}
    # Gradients that were applied are zeros.
    keep = Keep.ALL if optimizer.has_gradient else Keep.NOTHING
    return {"grads": ([*optimizer.gradients()], keep)}
