"""Configuration, and parallel sizes that do not fit: the nearest ones are named before
a device is taken.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from coupler.config.schema import RouterReplay, RunConfig
from coupler.engine_kit.adamw import Schedule
from coupler_engine_megatron.config import TESTED, MegatronConfig
from coupler_engine_megatron.layout import problems, stage_layers
from coupler_engine_megatron.plugin import coupler_backends, coupler_validate

DENSE = {
    "model_type": "qwen2",
    "hidden_size": 192,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 24,
    "intermediate_size": 96,
}
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8}


@pytest.mark.parametrize(
    ("settings", "ranks", "shape", "what", "fix"),
    [
        (
            {"tensor_parallel": 2},
            3,
            None,
            "engine.ranks=3 is no multiple of",
            "engine.ranks=2 or 4",
        ),
        (
            {"tensor_parallel": 3},
            3,
            DENSE,
            (
                "engine.tensor_parallel=3 neither divides the model's 4 key-value heads nor is a "
                "multiple of them"
            ),
            "engine.tensor_parallel=2 or 4",
        ),
        (
            {"tensor_parallel": 6},
            6,
            {**DENSE, "num_key_value_heads": 2},
            (
                "engine.tensor_parallel=6 does not divide the model's 256 rows of queries, keys "
                "and values"
            ),
            "engine.tensor_parallel=2 or 4",
        ),
        (
            {"pipeline_parallel": 5},
            5,
            DENSE,
            "does not divide the 24 layers",
            "engine.last_stage_layers=4, or engine.pipeline_parallel=4 or 6",
        ),
        (
            {"pipeline_parallel": 4, "virtual_pipeline": 4},
            4,
            DENSE,
            "pipeline_parallel x virtual_pipeline = 4 x 4 does not divide the 24 layers",
            (
                "engine.first_stage_layers=4 and engine.last_stage_layers=4, or "
                "engine.pipeline_parallel=2 or 3"
            ),
        ),
        (
            {"pipeline_parallel": 25},
            25,
            DENSE,
            "does not divide the 24 layers",
            "engine.pipeline_parallel=12 or 24",
        ),
        (
            {"pipeline_parallel": 4, "first_stage_layers": 5},
            4,
            DENSE,
            (
                "with engine.first_stage_layers=5 does not split the 24 layers evenly over the "
                "other stages"
            ),
            (
                "engine.first_stage_layers=6, or engine.pipeline_parallel=3 or 4 with "
                "engine.first_stage_layers=0 and "
            ),
        ),
        (
            {"pipeline_parallel": 2, "first_stage_layers": 8, "last_stage_layers": 8},
            2,
            DENSE,
            "with engine.first_stage_layers=8 and engine.last_stage_layers=8 does not split",
            "engine.first_stage_layers=12 and engine.last_stage_layers=12, or",
        ),
        (
            {"first_stage_layers": 3},
            1,
            None,
            (
                "engine.first_stage_layers and engine.last_stage_layers need "
                "engine.pipeline_parallel above 1"
            ),
            "engine.first_stage_layers=0",
        ),
        (
            {"pipeline_parallel": 5, "last_stage_layers": 4, "recompute_num_layers": 2},
            5,
            DENSE,
            "engine.recompute_num_layers=2 does not divide the 4 or 5 layers of each part",
            "engine.recompute_num_layers=1",
        ),
        (
            {"virtual_pipeline": 2},
            1,
            None,
            "needs engine.pipeline_parallel above 1",
            "engine.pipeline_parallel=2",
        ),
        ({"expert_parallel": 2}, 2, DENSE, "need experts", "engine.expert_parallel=1"),
        (
            {"expert_parallel": 3},
            3,
            MOE,
            "does not divide the model's 8 experts",
            "engine.expert_parallel=2 or 4",
        ),
        (
            {"tensor_parallel": 2, "sequence_parallel": False},
            2,
            MOE,
            "would compute every expert's tokens twice",
            "engine.sequence_parallel=true",
        ),
        (
            {"expert_parallel": 4},
            2,
            MOE,
            "does not divide the 2 ranks",
            "engine.expert_parallel=1 or 2",
        ),
        (
            {"tensor_parallel": 4, "expert_tensor_parallel": 2},
            4,
            MOE,
            "is neither 1 nor engine.tensor_parallel",
            "engine.expert_tensor_parallel=1 or 4",
        ),
        (
            {"tensor_parallel": 4, "expert_tensor_parallel": 4},
            4,
            {**MOE, "moe_intermediate_size": 6},
            "does not divide the 6 columns of an expert",
            "engine.expert_tensor_parallel=1",
        ),
        (
            {"tensor_parallel": 4, "expert_parallel": 4},
            4,
            {**MOE, "moe_intermediate_size": 6, "n_shared_experts": 1},
            "does not divide the model's 6 columns of shared experts",
            "engine.tensor_parallel=1 or 2",
        ),
    ],
)
def test_a_size_that_does_not_fit_names_the_nearest_that_do(
    settings: dict[str, int], ranks: int, shape: dict[str, int] | None, what: str, fix: str
) -> None:
    found = list(problems(MegatronConfig(**settings), ranks, shape))
    assert any(what in first and fix in second for first, second in found), found


@pytest.mark.parametrize(
    ("settings", "ranks", "shape"),
    [
        ({"tensor_parallel": 4, "pipeline_parallel": 2, "context_parallel": 2}, 32, DENSE),
        ({"pipeline_parallel": 4, "virtual_pipeline": 3}, 4, DENSE),
        (
            {
                "pipeline_parallel": 4,
                "virtual_pipeline": 2,
                "first_stage_layers": 4,
                "last_stage_layers": 8,
            },
            4,
            DENSE,
        ),
        ({"tensor_parallel": 4}, 4, {**DENSE, "num_key_value_heads": 2}),
        ({"tensor_parallel": 2, "expert_parallel": 8, "pipeline_parallel": 2}, 16, MOE),
        ({"tensor_parallel": 4, "expert_tensor_parallel": 4, "expert_parallel": 2}, 8, MOE),
    ],
)
def test_sizes_that_fit_are_no_problem(
    settings: dict[str, int], ranks: int, shape: dict[str, int]
) -> None:
    config = MegatronConfig(**settings)
    assert list(problems(config, ranks, shape)) == [] and ranks % config.ranks_per_group == 0


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, 1.5, True])
@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "num_experts"])
def test_a_count_that_is_no_whole_number_is_named(name: str, value: object) -> None:
    found = problems(MegatronConfig(), 1, {**MOE, name: value})
    assert list(found) == [
        (f"the model's config.json has no whole number as {name}", "model.path=another model")
    ]


def test_data_shards_that_share_experts_are_a_group() -> None:
    assert MegatronConfig(expert_parallel=2).ranks_per_group == 2
    assert MegatronConfig(tensor_parallel=2, expert_parallel=2).ranks_per_group == 2
    assert (
        MegatronConfig(pipeline_parallel=2, context_parallel=2, expert_parallel=4).ranks_per_group
        == 8
    )


LAYERS = 12
SPLITS = {  # (stages, turns, first, last): layers of each stage
    key: split
    for key in product((2, 3, 4), (1, 2), (0, 2, 3, 4, 8), (0, 2, 4))
    if (split := stage_layers(LAYERS, *key))
}


def test_megatron_splits_layers_as_the_plan_does() -> None:
    """Every layer on one rank, and as many on each as the plan says."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from coupler_engine_megatron.settings import stage_settings

    assert (
        SPLITS[2, 2, 8, 4] == [8, 4]
        and SPLITS[4, 1, 3, 0] == [3, 3, 3, 3]
        and SPLITS[4, 2, 4, 4] == [4, 2, 2, 4]
    )
    for (stages, turns, first, last), split in SPLITS.items():
        ends = MegatronConfig(
            pipeline_parallel=stages, first_stage_layers=first, last_stage_layers=last
        )
        config = SimpleNamespace(
            num_layers=LAYERS,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=turns if turns > 1 else None,
            pipeline_model_parallel_layout=None,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
            **stage_settings(ends),
        )
        found: list[int] = []
        for turn, stage in product(range(turns), range(stages)):
            number = get_num_layers_to_build(config, turn, stage)
            assert number == split[stage] // turns, split
            found += range(
                start := get_transformer_layer_offset(config, turn, stage), start + number
            )
        assert found == list(range(LAYERS)), split


def test_a_plan_prints_how_ranks_split_the_work() -> None:
    assert MegatronConfig(
        ranks=4, tensor_parallel=2, pipeline_parallel=2, virtual_pipeline=3
    ).split == ("tensor 2 x pipeline 2 x virtual pipeline 3")
    assert MegatronConfig(ranks=4).split == ""
    assert MegatronConfig(pipeline_parallel=3, first_stage_layers=2, last_stage_layers=1).split == (
        "pipeline 3, layers: 2 on the first stage, 1 on the last stage"
    )


def test_a_plan_says_which_sizes_no_test_has_together() -> None:
    """Its table has what layouts are tested in, all of it and nothing else."""
    import test_engine
    import test_routing

    kit = (
        (Path(__file__).parents[3] / "Makefile")
        .read_text()
        .partition("LAYOUTS := ")[2]
        .partition("KIT_")[0]
    )
    every = [settings for _, _, settings in test_engine.LAYOUTS.values()]
    every += [settings for _, settings in test_routing.LAYOUTS.values()]
    every += [
        {key: int(size) for key, size in re.findall(r"(\w+)=(\d+)", layout)}
        for layout in kit.split()
    ]
    splits = {MegatronConfig(**settings).split for settings in every} - {""}
    assert {re.sub(r" \d+", "", split.partition(",")[0]) for split in splits} == TESTED
    three = MegatronConfig(tensor_parallel=2, pipeline_parallel=2, context_parallel=2)
    assert three.split == (
        "tensor 2 x pipeline 2 x context 2 (no test of coupler-engine-megatron has these together)"
    )


def test_a_plan_names_the_engine_of_the_role(tmp_path: Path) -> None:
    """Each with its own model where there is one."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    config = RunConfig(
        engine=MegatronConfig(ranks=3, tensor_parallel=3), router_replay=RouterReplay.R2
    )
    config.model.path = config.reward_model.model.path = str(tmp_path)
    config.critic.engine = MegatronConfig(ranks=3, pipeline_parallel=2)
    config.reward_model.engine = MegatronConfig(ranks=3, pipeline_parallel=2)
    lines = list(coupler_validate(config))
    assert any(
        line.startswith("engine.tensor_parallel=3 neither")
        and "set engine.tensor_parallel=" in line
        for line in lines
    )
    for role in ("critic", "reward_model"):
        said = f"{role}.engine.ranks=3 is no multiple"
        assert any(line.startswith(said) for line in lines), role
    assert any(line.startswith("router_replay=R2 needs a model with experts") for line in lines)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_parallel", 0),
        ("last_stage_layers", -1),
        ("lr", 0.0),
        ("weight_decay", -0.1),
        ("beta2", 1.0),
        ("min_lr_ratio", 2.0),
        ("eps", 0.0),
    ],
)
def test_a_value_out_of_range_is_named_in_full(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"engine.{key} must")):
        MegatronConfig(**{key: value})


def test_a_schedule_needs_room_for_its_parts() -> None:
    with pytest.raises(ValueError, match=r"engine\.total_steps must be at least 11"):
        MegatronConfig(schedule=Schedule.COSINE, warmup_steps=10, total_steps=10)


def test_the_plugin_is_listed_without_importing_megatron() -> None:
    (backend,) = coupler_backends()
    assert (backend.kind, backend.name, backend.config().name) == ("engine", "megatron", "megatron")
    assert {"megatron-core", "mbridge", "torch", "transformers", "transformer-engine"} == set(
        backend.tested
    )
    code = (
        "import sys, coupler_engine_megatron.plugin;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'megatron', 'mbridge', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
