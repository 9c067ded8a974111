"""Check that parallel sizes fit a model and a number of ranks.

A plan asks before a device is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

from coupler.engine_kit.json_files import DamagedFile, read_json
from coupler_engine_megatron.config import MegatronConfig, RecomputeMethod

Problem = tuple[str, str]
NEEDED = (
    "num_attention_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
)
"""Counts of a model that every check needs."""
WHOLE = (
    *NEEDED,
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "n_shared_experts",
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
)
"""Counts that may be absent, too."""


def read_shape(folder: Path) -> Mapping[str, Any] | None:
    """Return the ``config.json`` of a model folder, or None if there is none.

    Setup says what is wrong with one that cannot be read.
    """
    try:
        return read_json(folder / "config.json")
    except DamagedFile:
        return None


def problems(
    config: MegatronConfig, ranks: int, shape: Mapping[str, Any] | None, path: str = "engine"
) -> Iterator[Problem]:
    """Yield every size that does not fit.

    Args:
        shape: the model's ``config.json``, None if it is not known yet.
        path: the place of ``config`` in the run's configuration.
    """
    yield from _of_ranks(config, ranks, path)

    if config.virtual_pipeline > 1 and config.pipeline_parallel == 1:
        what = (
            f"{path}.virtual_pipeline={config.virtual_pipeline} needs "
            f"{path}.pipeline_parallel above 1"
        )
        yield what, f"{path}.virtual_pipeline=1, or {path}.pipeline_parallel=2"
    if config.pipeline_parallel == 1 and (config.first_stage_layers or config.last_stage_layers):
        names = f"{path}.first_stage_layers", f"{path}.last_stage_layers"
        what = f"{names[0]} and {names[1]} need {path}.pipeline_parallel above 1"
        yield what, f"{names[0]}=0 and {names[1]}=0, or {path}.pipeline_parallel=2"
    if config.expert_tensor_parallel not in (1, config.tensor_parallel):
        key = f"{path}.expert_tensor_parallel"
        what = f"{key}={config.expert_tensor_parallel} is neither 1 nor {path}.tensor_parallel"
        yield what, f"{key}={_either({1, config.tensor_parallel})}"
    if shape is not None:
        yield from _of_adapter(config, shape, path)
        yield from _of_model(config, shape, path)


def _of_ranks(config: MegatronConfig, ranks: int, path: str) -> Iterator[Problem]:
    shard = config.ranks_per_shard
    if ranks % shard:
        sizes = (
            f"{config.tensor_parallel} x {config.pipeline_parallel} x "
            f"{config.context_parallel} = {shard}"
        )
        what = (
            f"{path}.ranks={ranks} is no multiple of tensor_parallel x pipeline_parallel x "
            f"context_parallel = {sizes}"
        )
        near = {max(ranks // shard, 1) * shard, -(-ranks // shard) * shard}
        yield what, f"{path}.ranks={_either(near)}"
        return

    room = ranks // (config.pipeline_parallel * config.expert_tensor_parallel)
    if room % config.expert_parallel:
        yield (
            f"{path}.expert_parallel={config.expert_parallel} does not divide the {room} "
            "ranks that a pipeline stage has for different experts",
            f"{path}.expert_parallel={_nearest(config.expert_parallel, _divisors(room))}",
        )


def _of_adapter(config: MegatronConfig, shape: Mapping[str, Any], path: str) -> Iterator[Problem]:
    if config.lora_rank and shape.get("kv_lora_rank"):
        yield (
            f"{path}.lora_rank={config.lora_rank} adapts no latent attention, which the model "
            f"of type {shape.get('model_type')!r} has",
            f"{path}.lora_rank=0, or {path}=fsdp",
        )


def _of_counts(shape: Mapping[str, Any]) -> Iterator[Problem]:
    missing = [name for name in NEEDED if not shape.get(name)]
    odd = [name for name in WHOLE if type(shape.get(name) or 0) is not int]
    for names, what in ((missing, "no"), (odd, "no whole number as")):
        if names:
            said = f"the model's config.json has {what} {', '.join(names)}"
            yield said, "model.path=another model"


def _of_model(config: MegatronConfig, shape: Mapping[str, Any], path: str) -> Iterator[Problem]:
    if odd := list(_of_counts(shape)):
        yield from odd
        return

    heads, layers = shape["num_attention_heads"], shape["num_hidden_layers"]
    experts = experts_of(shape)
    groups = shape.get("num_key_value_heads") or heads
    tensor, expert = config.tensor_parallel, config.expert_parallel
    # The columns of an expert.
    columns = shape.get("moe_intermediate_size") or shape["intermediate_size"]
    width = shape.get("head_dim") or shape["hidden_size"] // heads

    split = {
        "attention heads": heads,
        "rows of queries, keys and values": (heads + 2 * groups) * width,
        "intermediate columns": shape["intermediate_size"],
    }
    if shared := shape.get("n_shared_experts"):
        split["columns of shared experts"] = shared * columns

    bad = []
    if groups % tensor and tensor % groups:
        bad.append(
            f"neither divides the model's {groups} key-value heads nor is a multiple of them"
        )
    bad += [
        f"does not divide the model's {number} {what}"
        for what, number in split.items()
        if number % tensor
    ]

    if bad:
        good = [d for d in _divisors(gcd(*split.values())) if groups % d == 0 or d % groups == 0]
        yield (
            f"{path}.tensor_parallel={tensor} {bad[0]}",
            f"{path}.tensor_parallel={_nearest(tensor, good)}",
        )

    if config.pipeline_parallel > 1:
        yield from _of_stages(config, layers, path)
    else:
        yield from _of_recompute(config, [layers], path)

    if not experts and max(expert, config.expert_tensor_parallel) > 1:
        yield (
            f"{path}.expert_parallel={expert} and "
            f"expert_tensor_parallel={config.expert_tensor_parallel} need experts, "
            f"which a model of type {shape.get('model_type')!r} has none of",
            f"{path}.expert_parallel=1 and {path}.expert_tensor_parallel=1",
        )
    elif experts and tensor > 1 and not config.sequence_parallel:
        yield (
            f"{path}.sequence_parallel=false with tensor_parallel={tensor} would compute "
            "every expert's tokens twice",
            f"{path}.sequence_parallel=true",
        )
    elif experts and columns % config.expert_tensor_parallel:
        good = [d for d in {1, tensor} if columns % d == 0]
        yield (
            f"{path}.expert_tensor_parallel={config.expert_tensor_parallel} does not divide "
            f"the {columns} columns of an expert",
            f"{path}.expert_tensor_parallel={_either(good)}",
        )
    elif experts and experts % expert:
        yield (
            f"{path}.expert_parallel={expert} does not divide the model's {experts} experts",
            f"{path}.expert_parallel={_nearest(expert, _divisors(experts))}",
        )


def _of_stages(config: MegatronConfig, layers: int, path: str) -> Iterator[Problem]:
    """Yield problems of the layers of a pipeline's stages.

    Those of their parts that are computed again are checked too.
    """
    stages, turns = config.pipeline_parallel, config.virtual_pipeline
    ends = config.first_stage_layers, config.last_stage_layers
    if split := stage_layers(layers, stages, turns, *ends):
        yield from _of_recompute(config, [number // turns for number in split], path)
        return

    sizes = f"{path}.pipeline_parallel x virtual_pipeline = {stages} x {turns}"
    names = f"{path}.first_stage_layers", f"{path}.last_stage_layers"
    if any(ends):
        chosen = _settings(names, ends)
        what = f"{sizes} with {chosen} does not split the {layers} layers evenly over the "
        what += "other stages"
    else:
        what = f"{sizes} does not divide the {layers} layers"

    good = [d for d in _divisors(layers) if layers % (d * turns) == 0]
    fix = f"{path}.pipeline_parallel={_nearest(stages, good or _divisors(layers))}"
    fix += "" if good else " and virtual_pipeline=1"
    fix += f" with {names[0]}=0 and {names[1]}=0" if any(ends) else ""
    if near := _nearest_ends(layers, stages, turns, *ends):
        fix = f"{_settings(names, near)}, or {fix}"
    yield what, fix


def _settings(names: tuple[str, str], numbers: tuple[int, int]) -> str:
    pairs = zip(names, numbers, strict=True)
    return " and ".join(f"{name}={number}" for name, number in pairs if number)


def stage_layers(layers: int, stages: int, turns: int, first: int, last: int) -> list[int]:
    """Return the layers of each of several stages, or none if they cannot be split so.

    Args:
        turns: parts of equal size that each stage has.
        first: layers of the first stage, 0 for as many as those between have.
        last: layers of the last stage; 0 as for the first.
    """
    ends = {stage: number for stage, number in ((0, first), (stages - 1, last)) if number}
    others = stages - len(ends)
    each = (layers - sum(ends.values())) // others if others else 0
    split = [ends.get(stage, each) for stage in range(stages)]
    return split if sum(split) == layers and all(n > 0 and n % turns == 0 for n in split) else []


def _nearest_ends(
    layers: int, stages: int, turns: int, first: int, last: int
) -> tuple[int, int] | None:
    """Return the nearest layers of the first and of the last stage that fit.

    If neither is set, they are those of the evenest split.
    """
    chosen = (first, last) if first or last else None
    sizes = (0, *range(turns, layers, turns))
    fitting = [
        (abs(a - first) + abs(b - last) if chosen else 0, max(split), (a > 0) + (b > 0), a, b)
        for a, b in product(sizes, sizes)
        if (split := stage_layers(layers, stages, turns, a, b))
        and (not chosen or (a > 0, b > 0) == (first > 0, last > 0))
    ]
    return min(fitting)[-2:] if fitting else None


def _of_recompute(config: MegatronConfig, parts: list[int], path: str) -> Iterator[Problem]:
    """Yield problems of the layers of each part that are computed again."""
    number = config.recompute_num_layers
    layers = _either(set(parts))
    if config.recompute_method == RecomputeMethod.UNIFORM and any(part % number for part in parts):
        what = (
            f"{path}.recompute_num_layers={number} does not divide the {layers} layers of "
            "each part of the model"
        )
        yield what, f"{path}.recompute_num_layers={_nearest(number, _divisors(gcd(*parts)))}"
    if number > max(parts):
        what = (
            f"{path}.recompute_num_layers={number} is more than the {layers} layers of each "
            "part of the model"
        )
        yield what, f"{path}.recompute_num_layers={max(parts)}"


def experts_of(shape: Mapping[str, Any]) -> int:
    """Return the number of experts of each layer, 0 if there are none."""
    return (
        shape.get("n_routed_experts")
        or shape.get("num_local_experts")
        or shape.get("num_experts")
        or 0
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(value: int, good: list[int]) -> str:
    return _either(sorted(good, key=lambda d: abs(d - value))[:2])


def _either(values: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(values)))
