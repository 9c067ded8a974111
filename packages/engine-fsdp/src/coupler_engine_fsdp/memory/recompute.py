"""Choose how many layers of ``engine=fsdp`` compute their activations again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from coupler.engine_kit.memory_plan import Asked, Needs, Recomputed, fewest
from coupler_engine_fsdp.config import FSDPConfig, Recompute
from coupler_engine_fsdp.memory.engine import needs
from coupler_engine_fsdp.model import build, can_choose, layers_of


def choose(config: FSDPConfig, asked: Asked, fits: Callable[[Needs], bool] | None) -> Recomputed:
    """Return the fewest layers whose needs fit, or all layers where none do.

    Where the layers of a model cannot recompute one by one, that is none or all.

    Args:
        fits: judges the needs of a number of layers. None where nothing is known of the
            device, which takes all layers.

    Raises:
        CouplerError: the model cannot be built.
    """
    policy = build(asked.model, tile=0, recomputed=None)
    every = len(layers_of(policy))
    each = 1 if can_choose(policy) else every

    def with_first(layers: int) -> FSDPConfig:
        if not layers:
            return replace(config, gradient_checkpointing=Recompute.FALSE)
        number = 0 if layers == every else layers
        return replace(config, gradient_checkpointing=Recompute.TRUE, recompute_num_layers=number)

    layers = every
    if fits:
        layers = each * fewest(every // each, lambda n: fits(needs(with_first(each * n), asked)))
    made = with_first(layers)
    return Recomputed(made, needs(made, asked), layers, every)
