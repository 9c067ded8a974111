"""Small models for tests on GPUs, and what bf16 costs transformers there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from families import Start
from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from coupler.testing.models import VOCAB
from coupler.testing.ranks import World
from coupler.testing.reference import TransformersReference

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(
        find_spec("transformer_engine") is None, reason="there is no Transformer Engine"
    ),
]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
EXPERTS = {
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen2": Qwen2Config(
        **{k: v for k, v in SHAPE.items() if k != "head_dim"}, tie_word_embeddings=True
    ),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "shared-head": Qwen3Config(**{**SHAPE, "num_key_value_heads": 1}, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=False),
    "latent": DeepseekV3Config(
        **{k: v for k, v in SHAPE.items() if k != "head_dim"},
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=128,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        rms_norm_eps=1e-2,  # which the norms of latent attention do not take
        tie_word_embeddings=False,
    ),
}


def on_gpus(start: Start) -> Start:
    """With as many GPUs as ranks, and weights that stay."""

    def make(folder: Path, ranks: int, **settings: object) -> World:
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
        return start(
            folder, ranks, deadline_s=300.0, **{"lr": 1e-30, "max_tokens_per_gpu": 64, **settings}
        )

    return make


class Rounded(TransformersReference):
    """What transformers computes in bf16, with everything about a log-prob in fp32:
    what rounding costs there.
    """

    def __init__(self, exact: TransformersReference) -> None:
        super().__init__(exact.folder)
        self.model = self.model.to("cuda", torch.bfloat16)

    def _logits(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        ids = tokens[None].long().cuda()
        logits = self.model(input_ids=ids, use_cache=False).logits[0].float().cpu() / temperature
        return torch.cat([torch.zeros_like(logits[:1]), logits[:-1]])


def closeness(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """Cosine of the angle between two whole gradients."""
    a, b = (np.concatenate([g[n].ravel() for n in want]).astype(np.float64) for g in (got, want))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
