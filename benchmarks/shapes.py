"""Qwen2.5 shapes (and one as large as SmolLM2) as model folders without weights, for
the benchmarks of rollouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}


def write_shape(folder: Path, name: str) -> Path:
    """Write the configuration of a shape; every backend makes random weights from
    it.
    """
    from transformers import Qwen2Config

    Qwen2Config(
        max_position_embeddings=8192, architectures=["Qwen2ForCausalLM"], **SHAPES[name]
    ).save_pretrained(folder)
    return folder


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model has."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False), trust_remote_code=False
        )
    return {
        name: tuple(param.shape) for name, param in model.named_parameters()
    }  # a tied tensor once
