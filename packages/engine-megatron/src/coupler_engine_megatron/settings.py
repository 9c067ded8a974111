"""What Megatron's ``TransformerConfig`` is told beyond the model's shape."""

from __future__ import annotations

import os
from typing import Any

import torch

from coupler.errors import ConfigError
from coupler.interfaces import Rank
from coupler_engine_megatron.config import MegatronConfig, Recompute
from coupler_engine_megatron.layout import experts_of, problems


def check_layout(config: MegatronConfig, shape: Any, rank: Rank) -> None:
    """Refuse parallel sizes that do not fit.

    Raises:
        ConfigError: names the first one, with the nearest sizes that do.
    """
    for what, fix in problems(config, rank.world, shape.to_dict()):
        raise ConfigError(f"{what}.\n  try:  {fix}")


def transformer_settings(config: MegatronConfig, shape: Any, rank: Rank, fused: bool) -> dict[str, Any]:
    """Settings for :func:`coupler_engine_megatron.bridge.make_bridge`.

    Args:
        shape: the model's configuration.
        fused: use the kernels of Transformer Engine and Megatron; they exist for half precision on a GPU.
    """
    settings: dict[str, Any] = {
        "calculate_per_token_loss": True,  # gradients are summed over ranks and micro-batches
        "sequence_parallel": config.sequence_parallel and config.tensor_parallel > 1,
        "attention_dropout": 0.0,  # a log-prob is one of the distribution that is sampled
        "hidden_dropout": 0.0,
        "use_cpu_initialization": False,
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,  # needs a kernel of apex
        "persist_layer_norm": False,
        "apply_rope_fusion": fused,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "deterministic_mode": rank.deterministic,
    }
    if experts_of(shape.to_dict()):
        settings |= {
            "moe_grouped_gemm": fused,
            "moe_permute_fusion": fused,
            "moe_router_dtype": "fp32",
            "moe_router_pre_softmax": not shape.norm_topk_prob,  # over all experts, or over those that were chosen
        }
    if config.gradient_checkpointing is Recompute.FULL:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif config.gradient_checkpointing is Recompute.SELECTIVE:
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return settings


def be_deterministic() -> None:
    """Choose kernels that give equal bits for equal inputs, in this process."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True, warn_only=True)
