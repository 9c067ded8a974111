"""Choose how many layers of ``engine=megatron`` compute their activations again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from coupler.engine_kit.memory_plan import Asked, Needs, Recomputed, fewest
from coupler_engine_megatron.config import MegatronConfig, Recompute, RecomputeMethod
from coupler_engine_megatron.memory_plan import Sizes, Stage, needs


def choose(
    config: MegatronConfig, asked: Asked, fits: Callable[[Needs], bool] | None
) -> Recomputed:
    """Return the fewest layers whose needs fit, or all layers where none do.

    They are the first ones of each stage of the pipeline, or of each of its parts where
    ``virtual_pipeline`` gives it several. All stages have the same number.

    Args:
        fits: judges the needs of a number of layers. None where nothing is known of the
            device, which takes all layers.

    Raises:
        CouplerError: transformers cannot build the model.
    """
    sizes = Sizes.of(config, asked.model)
    stages = [Stage(config, asked, sizes, number) for number in range(config.pipeline_parallel)]
    every = max(len(stage.layers) for stage in stages) // config.virtual_pipeline

    def with_first(layers: int) -> MegatronConfig:
        if not layers:
            return replace(config, gradient_checkpointing=Recompute.NONE)
        if layers == every:
            return replace(config, gradient_checkpointing=Recompute.FULL)
        return replace(
            config,
            gradient_checkpointing=Recompute.FULL,
            recompute_method=RecomputeMethod.BLOCK,
            recompute_num_layers=layers,
        )

    layers = fewest(every, lambda n: fits(needs(with_first(n), asked))) if fits else every
    made = with_first(layers)
    return Recomputed(made, needs(made, asked), layers, every)
