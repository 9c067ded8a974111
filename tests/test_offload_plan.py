"""What leaves a GPU under ``offload=auto``, by the plans of real backends."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from coupler.config.compose import compose
from coupler.config.schema import Job, Offload
from coupler.engine_kit.memory_plan import Phase
from coupler.interfaces import Memory, Part
from coupler.plugins.manager import Plugins
from coupler.run.memory_plan import MemoryPlan, plan_memory
from coupler.run.plan import make_plan
from coupler.testing.memory import LARGE

GPU_GIB = 139.8


def planned(engine: str, rollout: str, folder: Path, cache: int = 60) -> MemoryPlan:
    """Plan GRPO of 1.5B, whose training does not fit beside a cache of 60 GiB."""
    AutoConfig.for_model(**LARGE["1.5b"]).save_pretrained(folder)
    recompute = {"fsdp": "false", "megatron": "none"}[engine]
    overrides = [
        f"engine={engine}", f"rollout={rollout}", f"rollout.kv_cache_gib={cache}", "algorithm=grpo",
        "algorithm.kl=none", f"model.path={folder}", "data.source=x.jsonl", "reward.target=a:b",
        "data.max_prompt_tokens=96", "sampling.max_tokens=512", "prompts_per_step=32",
        "samples_per_prompt=8", "engine.max_tokens_per_gpu=16384",
        f"engine.gradient_checkpointing={recompute}",
    ]  # fmt: skip
    plugins = Plugins.load()
    config = compose(plugins, overrides, job=Job.TRAIN).config
    return plan_memory(config, make_plan(config, None, plugins), GPU_GIB)


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize("rollout", ["vllm", "sglang"])
def test_the_cache_leaves_and_the_policy_stays(engine: str, rollout: str, tmp_path: Path) -> None:
    """All but training fits beside the cache, so that nothing is copied."""
    found = planned(engine, rollout, tmp_path)
    assert found.offload is Offload.AUTO and not found.unknown

    there = {row.phase: row.stays | row.active for row in found.devices[0].turns}
    policy = {("policy", Part.PARAMS), ("policy", Part.OPTIMIZER)}
    assert policy <= there[Phase.SAMPLING] & there[Phase.TRAINING]
    assert ("rollout", Memory.KV_CACHE) not in there[Phase.TRAINING]
    assert found.moved_bytes == 0


def test_all_leaves_where_sglang_chooses_its_cache(tmp_path: Path) -> None:
    found = planned("fsdp", "sglang", tmp_path, cache=0)
    assert found.unknown and found.offload is Offload.TRUE
