"""Every option that engine=megatron declares has an effect: here is what shows it of
each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest
import test_layout
import test_lora
import test_memory_options
import test_optimizer
import test_routing
from megatron.core import parallel_state

from coupler.interfaces import EngineConfig, Layout, Model, Rank
from coupler.testing.cases import make_batch
from coupler.testing.conformance import test_engine as kit
from coupler.testing.models import write_qwen2
from coupler.testing.reference import TransformersReference
from coupler_engine_megatron import bridge, distributed
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine
from coupler_engine_megatron.settings import transformer_settings

SIZES = {  # of each option and Megatron's name for it, a number that no other has
    "tensor_parallel": ("tensor_model_parallel_size", 2),
    "pipeline_parallel": ("pipeline_model_parallel_size", 3),
    "virtual_pipeline": ("virtual_pipeline_model_parallel_size", 5),
    "context_parallel": ("context_parallel_size", 7),
    "expert_parallel": ("expert_model_parallel_size", 11),
    "expert_tensor_parallel": ("expert_tensor_parallel_size", 13),
}
OTHER: dict[
    str, tuple[Mapping[str, Any], Callable[[MegatronEngine, TransformersReference], Any]]
] = {
    # the settings of an engine that differs from a plain one in what is read here
    "dtype": (
        {"dtype": "bf16"},
        lambda engine, _: next(iter(engine.catalogue.parameters.values())).dtype,
    ),
    "sync_dtype": ({"sync_dtype": "bf16"}, lambda engine, _: next(engine.weights())[1].dtype),
    "sync_bucket_mib": ({"sync_bucket_mib": 1}, lambda engine, _: engine.catalogue.bucket_bytes),
    "logits_tile": ({"logits_tile": 64}, lambda engine, _: bridge.head_of(engine.chunks[-1]).tile),
    "max_tokens_per_gpu": (
        {"max_tokens_per_gpu": 14},
        lambda engine, reference: len(engine._micro_batches(make_batch(reference))),
    ),
}
PROOFS: dict[str, object] = {
    **dict.fromkeys(SIZES, "test_sizes_reach_megatron"),
    **dict.fromkeys(OTHER, "test_an_option_reaches_what_reads_it"),
    "sequence_parallel": "test_sequence_parallelism_reaches_megatron",
    **dict.fromkeys(
        ("first_stage_layers", "last_stage_layers"),
        test_layout.test_megatron_splits_layers_as_the_plan_does,
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "recompute_method", "recompute_num_layers", "recompute_modules"),
        test_memory_options.test_what_is_computed_again,
    ),
    "overlap_grad_reduce": test_memory_options.test_weights_are_gathered_when_they_are_needed,
    "overlap_param_gather": test_memory_options.test_weights_are_gathered_when_they_are_needed,
    **dict.fromkeys(
        ("lora_rank", "lora_alpha", "target_modules", "lora_adapter_path"),
        test_lora.test_a_layout_changes_no_gradient_of_an_adapter,
    ),
    **dict.fromkeys(
        test_routing.LOSSES, test_routing.test_routes_and_losses_do_not_depend_on_the_layout
    ),
    "freeze_moe_router": test_routing.test_a_frozen_router_stays,
    **dict.fromkeys(
        test_optimizer.OPTIONS, test_optimizer.test_an_option_changes_what_two_steps_do
    ),
    **dict.fromkeys(
        {key for settings, _ in kit.SCHEDULES.values() for key in settings},
        kit.test_the_learning_rate_follows_its_schedule,
    ),
    "warmup_ratio": "test_a_share_of_warm_up_becomes_steps",
}


def test_every_option_is_shown_to_have_an_effect() -> None:
    declared = {field.name for field in fields(MegatronConfig)} - {
        field.name for field in fields(EngineConfig)
    }
    assert declared == PROOFS.keys()
    assert all(proof in globals() for proof in PROOFS.values() if isinstance(proof, str))


def test_sizes_reach_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    signature = inspect.signature(parallel_state.initialize_model_parallel)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(
        parallel_state,
        "initialize_model_parallel",
        lambda *a, **k: told.update(signature.bind(*a, **k).arguments),
    )
    monkeypatch.setattr(distributed, "model_parallel_cuda_manual_seed", lambda _: None)
    monkeypatch.setattr(distributed, "_layout", lambda: Layout((0,), (True,)))
    distributed.split_world(
        MegatronConfig(**{key: size for key, (_, size) in SIZES.items()}), Rank()
    )
    assert {name: told[name] for name, _ in SIZES.values()} == dict(SIZES.values())


def test_a_share_of_warm_up_becomes_steps() -> None:
    assert MegatronConfig(warmup_ratio=0.5).for_run(10).warmup_steps == 5


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> TransformersReference:
    return TransformersReference(write_qwen2(tmp_path_factory.mktemp("model"), tied=False))


@pytest.fixture(scope="module")
def started(reference: TransformersReference) -> Callable[..., MegatronEngine]:
    def make(**settings: Any) -> MegatronEngine:
        engine = MegatronEngine(MegatronConfig(**settings), Model(str(reference.folder)))
        engine.setup(Rank())
        return engine

    return make


@pytest.fixture(scope="module")
def plain(started: Callable[..., MegatronEngine]) -> MegatronEngine:
    return started()


@pytest.mark.parametrize("key", OTHER)
def test_an_option_reaches_what_reads_it(
    key: str,
    plain: MegatronEngine,
    started: Callable[..., MegatronEngine],
    reference: TransformersReference,
) -> None:
    settings, read = OTHER[key]
    assert read(started(**settings), reference) != read(plain, reference)


def test_sequence_parallelism_reaches_megatron(reference: TransformersReference) -> None:
    shape = reference.model.config
    on, off, alone = (
        transformer_settings(
            MegatronConfig(tensor_parallel=size, sequence_parallel=yes), shape, Rank(), fused=False
        )
        for size, yes in ((2, True), (2, False), (1, True))
    )
    assert [each["sequence_parallel"] for each in (on, off, alone)] == [True, False, False]
