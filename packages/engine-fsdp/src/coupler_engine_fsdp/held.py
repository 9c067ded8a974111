"""Name the tensors of an engine that leave the device together."""

from __future__ import annotations

from torch import Tensor, nn

from coupler.engine_kit.parked import Keep
from coupler.interfaces import Part
from coupler_engine_fsdp.masters import Masters
from coupler_engine_fsdp.optimizer import Optimizer

CHANGING = "params", "copies", "optimizer"
"""What of :func:`held` a step writes to."""


def held(
    part: Part,
    policy: nn.Module,
    masters: Masters,
    optimizer: Optimizer | None,
    masters_leave: bool,
) -> dict[str, tuple[list[Tensor], Keep]]:
    """Return the tensors of a part by what they are, and what the host keeps of them.

    Args:
        masters_leave: whether masters are in host memory but in a step.
    """
    if part is Part.OPTIMIZER:
        return {"optimizer": (optimizer.tensors() if optimizer else [], Keep.SAME)}

    pairs = masters.pairs.values()
    copies = {id(pair.copy): pair.copy for pair in pairs}
    others = [each for each in policy.parameters() if id(each) not in copies]
    kept = [*(pair.master for pair in pairs), *others]
    if part is Part.GRADS:
        every = [each.grad for each in (*kept, *copies.values())]
        return {"grads": ([grad for grad in every if grad is not None], Keep.ALL)}
    return {
        "params": ([each for each in kept if each.requires_grad], Keep.SAME),
        "frozen": ([each for each in kept if not each.requires_grad], Keep.SAME),
        # They are cast anew, unless masters are not on the device then.
        "copies": ([*copies.values()], Keep.SAME if masters_leave else Keep.NOTHING),
    }
