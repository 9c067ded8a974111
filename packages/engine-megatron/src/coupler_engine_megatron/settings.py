"""What Megatron's ``TransformerConfig`` is told beyond the model's shape."""

from __future__ import annotations

import os
from typing import Any

import torch

from coupler.errors import ConfigError
from coupler.interfaces import Rank
from coupler_engine_megatron.bridge import LATENT
from coupler_engine_megatron.config import MegatronConfig, Recompute
from coupler_engine_megatron.layout import experts_of, problems

FUSED = frozenset({"layernorm", "moe_act"})  # of what can be computed again; it takes Transformer Engine


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

    Raises:
        ConfigError: what is to be computed again cannot be without these.
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
    settings |= stage_settings(config)
    if experts_of(shape.to_dict()):
        settings |= {
            "moe_grouped_gemm": fused,
            "moe_permute_fusion": fused,
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.0,  # the losses of routing.Router take their place
            "moe_router_load_balancing_type": "none",
            "moe_z_loss_coeff": None,
        }
        settings |= (
            _of_latent_attention(shape)
            if shape.model_type == LATENT
            else {
                "moe_router_pre_softmax": not shape.norm_topk_prob  # over all experts, or over those that were chosen
            }
        )
    if config.gradient_checkpointing == Recompute.FULL:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": str(config.recompute_method),
            "recompute_num_layers": config.recompute_num_layers,
        }
    elif config.gradient_checkpointing == Recompute.SELECTIVE:
        if (only := FUSED.intersection(config.recompute_modules)) and not fused:
            raise ConfigError(
                f"engine.recompute_modules names {min(only)}, which only Transformer Engine computes again.\n"
                "  try:  leaving it out, or engine.dtype=bf16 on a GPU"
            )
        settings |= {"recompute_granularity": "selective", "recompute_modules": list(config.recompute_modules)}
    return settings


def stage_settings(config: MegatronConfig) -> dict[str, Any]:
    """Layers of the pipeline's ends, where they are set; of two stages one says those of the other."""
    first, last = config.first_stage_layers, config.last_stage_layers
    if config.pipeline_parallel == 2 and first:
        last = 0  # Megatron divides the layers between by the number of stages that there are
    return {"num_layers_in_first_pipeline_stage": first or None, "num_layers_in_last_pipeline_stage": last or None}


def _of_latent_attention(shape: Any) -> dict[str, Any]:
    """What mbridge leaves out of DeepSeek-V3, or sets for training it from scratch."""
    limited = shape.n_group > 1
    return {
        "mtp_num_layers": None,
        "attention_backend": "auto",  # as for every other model: a process has one
        "apply_rope_fusion": False,
        "moe_shared_expert_overlap": False,
        "moe_router_bias_update_rate": 0.0,  # the bias stays as it is in the checkpoint
        "moe_router_num_groups": shape.n_group if limited else None,
        "moe_router_group_topk": shape.topk_group if limited else None,
    }


def be_deterministic() -> None:
    """Choose kernels that give equal bits for equal inputs, in this process."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # attention of Transformer Engine
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products, where no process has made one yet
    torch.use_deterministic_algorithms(True, warn_only=True)
