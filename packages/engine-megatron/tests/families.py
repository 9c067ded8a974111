"""Small models of every family that the engine trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from coupler.batch import Batch
from coupler.testing.models import VOCAB, write_random
from coupler.testing.ranks import World
from coupler.testing.reference import TransformersReference

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **SHAPE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama3": LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3, head_dim=16),
    "linear-rope": LlamaConfig(
        **SHAPE,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        tie_word_embeddings=False,
    ),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True, head_dim=16),
    "odd-sizes": Qwen3Config(
        **{**SHAPE, "vocab_size": VOCAB + 1, "num_key_value_heads": 1},
        tie_word_embeddings=False,
        head_dim=16,
    ),
    "moe": Qwen3MoeConfig(
        **SHAPE, **EXPERTS, head_dim=16, norm_topk_prob=True, tie_word_embeddings=False
    ),
    "latent": DeepseekV3Config(**LATENT),
    "latent-yarn": DeepseekV3Config(**LATENT, rope_parameters=YARN),
    "latent-yarn-plain": DeepseekV3Config(
        **LATENT, rope_parameters=without(YARN, "mscale", "mscale_all_dim")
    ),
    "latent-yarn-mscale-alone": DeepseekV3Config(
        **LATENT, rope_parameters=without(YARN, "mscale_all_dim")
    ),
    "latent-eps": DeepseekV3Config(**LATENT, rms_norm_eps=0.5),
    "latent-eps-whole-queries": DeepseekV3Config(
        **{**LATENT, "q_lora_rank": None}, rms_norm_eps=0.5
    ),
    "moe-not-normalised": Qwen3MoeConfig(
        **SHAPE, **EXPERTS, head_dim=16, norm_topk_prob=False, tie_word_embeddings=False
    ),
}
Start = Callable[..., World]
References = Callable[[str], TransformersReference]


def references(
    configs: Mapping[str, PreTrainedConfig], folders: pytest.TempPathFactory
) -> References:
    """Write a small model of a name, once."""

    @cache
    def make(name: str) -> TransformersReference:
        folder = folders.mktemp(name)
        return TransformersReference(
            write_random(AutoModelForCausalLM.from_config(configs[name]), folder, 0)
        )

    return make


def shards(batch: Batch, world: World) -> list[Batch]:
    return [batch.take(rows) for rows in batch.partition(world.layout.num_shards)]
