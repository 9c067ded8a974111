"""Derive Megatron's ``TransformerConfig`` from ours, beyond the model's shape."""

from __future__ import annotations

import os
from typing import Any

import torch

from coupler.errors import ConfigError
from coupler.interfaces import Rank
from coupler_engine_megatron.bridge import LATENT
from coupler_engine_megatron.config import MegatronConfig, Recompute
from coupler_engine_megatron.layout import experts_of, problems

FUSED = frozenset({"layernorm", "moe_act"})
"""The recomputable parts that take Transformer Engine."""


def check_layout(config: MegatronConfig, shape: Any, rank: Rank) -> None:
    """Refuse parallel sizes that do not fit.

    Raises:
        ConfigError: names the first one, with the nearest sizes that do.
    """
    for what, fix in problems(config, rank.world, shape.to_dict()):
        raise ConfigError(f"{what}.\n  try:  {fix}")


def transformer_settings(
    config: MegatronConfig, shape: Any, rank: Rank, fused: bool
) -> dict[str, Any]:
    """Return the settings for :func:`coupler_engine_megatron.bridge.make_bridge`.

    Args:
        shape: the model's configuration.
        fused: use the kernels of Transformer Engine and Megatron; they exist for half
            precision on a GPU.

    Raises:
        ConfigError: a part that is to be computed again needs these kernels.
    """
    settings: dict[str, Any] = {
        # Gradients are summed over ranks and micro-batches.
        "calculate_per_token_loss": True,
        "sequence_parallel": config.sequence_parallel and config.tensor_parallel > 1,
        # A log-prob is one of the distribution that is sampled, so nothing is dropped.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": False,
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        # The fusion needs a kernel of apex.
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": fused,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "deterministic_mode": rank.deterministic,
    }
    settings |= stage_settings(config)
    if experts_of(shape.to_dict()):
        settings |= _of_experts(shape, fused)
    return settings | _of_recompute(config, fused)


def stage_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return the layers of the pipeline's ends, if they are set.

    With two stages, the layers of one end say those of the other.
    """
    first, last = config.first_stage_layers, config.last_stage_layers
    # Megatron divides the layers between the ends by the number of stages there.
    if config.pipeline_parallel == 2 and first:
        last = 0
    return {
        "num_layers_in_first_pipeline_stage": first or None,
        "num_layers_in_last_pipeline_stage": last or None,
    }


def _of_experts(shape: Any, fused: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "moe_router_dtype": "fp32",
        # The losses of routing.Router take the place of Megatron's.
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_z_loss_coeff": None,
    }
    if shape.model_type == LATENT:
        return settings | _of_latent_attention(shape)
    # The softmax is over all experts, or over the chosen ones.
    return settings | {"moe_router_pre_softmax": not shape.norm_topk_prob}


def _of_recompute(config: MegatronConfig, fused: bool) -> dict[str, Any]:
    if config.recomputes_layers:
        return {
            "recompute_granularity": "full",
            "recompute_method": str(config.recompute_method),
            "recompute_num_layers": config.recompute_num_layers,
        }
    if config.gradient_checkpointing != Recompute.SELECTIVE:
        return {}

    if (only := FUSED.intersection(config.recompute_modules)) and not fused:
        raise ConfigError(
            f"engine.recompute_modules names {min(only)}, which only Transformer Engine "
            "computes again.\n"
            "  try:  leaving it out, or engine.dtype=bf16 on a GPU"
        )
    return {
        "recompute_granularity": "selective",
        "recompute_modules": list(config.recompute_modules),
    }


def _of_latent_attention(shape: Any) -> dict[str, Any]:
    """Set what mbridge leaves out of DeepSeek-V3, or sets for training from scratch."""
    limited = shape.n_group > 1
    return {
        "mtp_num_layers": None,
        # A process has one backend, so it is as for every other model.
        "attention_backend": "auto",
        "apply_rope_fusion": False,
        "moe_shared_expert_overlap": False,
        # The bias stays as it is in the checkpoint.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": shape.n_group if limited else None,
        "moe_router_group_topk": shape.topk_group if limited else None,
    }


def be_deterministic() -> None:
    """Choose kernels that give equal bits for equal inputs, in this process."""
    # Attention of Transformer Engine.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    # Products of cuBLAS, if the process has made none yet.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
