"""mbridge behind a few functions: the only module that knows it, so that its successor can take its place.

It gives the model of a Hugging Face folder in Megatron-Core's layers, and says how Megatron-Core's parameters are made
of a checkpoint's tensors. Names here are those that the layers of Transformer Engine give their parameters, with the
numbers of layers and experts of the whole model; :mod:`coupler_engine_megatron.weights` translates others.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
from mbridge.core.llm_bridge import LLMBridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from transformers import AutoConfig

from coupler.errors import CouplerError
from coupler.interfaces import Head, Model
from coupler_engine_megatron.attention import PackedAttention
from coupler_engine_megatron.experts import grouped_experts
from coupler_engine_megatron.head import LogprobHead, ValueHead
from coupler_engine_megatron.linear import WholeLinear
from coupler_engine_megatron.norm import RMSNorm
from coupler_engine_megatron.routing import Router

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")  # model types whose log-probs and weights are tested
SCORE = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}
LATENT = "deepseek_v3"  # has multi-head latent attention, and routers with a bias
_ROPE = {"default", "linear", "llama3"}
_LATENT_ROPE = {"default", "yarn"}
_LATENT_EPS = 1e-6  # of the norms within latent attention in transformers, whatever rms_norm_eps is
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(model: Model) -> Any:
    """Read the folder's configuration, and refuse what would give other log-probs than the model's, without an error.

    Raises:
        CouplerError: there is no such folder, or the engine cannot train this model; the message says why.
    """
    if not Path(model.path).is_dir():
        raise CouplerError(
            f"model.path={model.path} is not a folder.\n  try:  a folder with config.json and safetensors"
        )
    try:  # transformers' own boundary: a broken folder raises OSError, ValueError, KeyError and others
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        raise CouplerError(f"model.path={model.path} cannot be read: {error}") from error
    kind = config.model_type
    if kind not in FAMILIES:
        raise CouplerError(
            f"engine=megatron cannot train model.path of type {kind!r}.\n  it trains:  {', '.join(FAMILIES)}"
        )
    rope = config.rope_parameters
    problems = {
        "its checkpoint is quantized": hasattr(config, "quantization_config"),
        f"its activation is {config.hidden_act!r}": config.hidden_act != "silu",
        "it has sliding-window attention": bool(getattr(config, "use_sliding_window", False)),
        f"its rotary embedding is of type {rope['rope_type']!r}": rope["rope_type"]
        not in (_LATENT_ROPE if kind == LATENT else _ROPE),
        "its llama3 rotary embedding has other factors than Llama 3's": rope["rope_type"] == "llama3"
        and any(rope[key] != value for key, value in _LLAMA3.items()),
        "its tokens go to one expert each (num_experts_per_tok=1)": getattr(config, "num_experts_per_tok", 0) == 1,
        **(_latent_problems(config) if kind == LATENT else {}),
    }
    for why, holds in problems.items():
        if holds:
            raise CouplerError(f"engine=megatron cannot train model.path of type {kind!r}: {why}.")
    config.rope_theta = rope["rope_theta"]  # where mbridge looks for it
    if model.head is Head.VALUE:
        config.tie_word_embeddings = False  # there is no head to tie
    return config


def _latent_problems(config: Any) -> dict[str, bool]:
    """What mbridge and Megatron-Core would take for something else in a model of DeepSeek-V3's kind."""
    limited, rope = config.n_group > 1, config.rope_parameters
    yarn = rope["rope_type"] == "yarn"
    return {
        "its rotary embedding is not interleaved": not config.rope_interleave,
        "the weights of its experts are not normalised": not config.norm_topk_prob,
        "its router does not judge groups of experts by the best two": limited
        and config.num_experts_per_tok != 2 * config.topk_group,
        "its yarn rotary embedding has an attention_factor of its own": yarn
        and rope.get("attention_factor") is not None,
        "its yarn rotary embedding is not truncated (truncate=false)": yarn and not rope.get("truncate", True),
        "its yarn rotary embedding has mscale_all_dim and no mscale": yarn
        and bool(rope.get("mscale_all_dim"))
        and not rope.get("mscale"),
    }


class _Readable:
    """A configuration as mbridge reads it: with ``in``, and without the layers that predict further tokens."""

    def __init__(self, config: Any) -> None:
        rope = config.rope_parameters
        # transformers reads no mscale where there is no mscale_all_dim; mbridge fills in 1 for each
        plain = {} if rope.get("mscale_all_dim") else {"mscale": 1.0, "mscale_all_dim": 0.0}
        self.rope_scaling = None if rope["rope_type"] == "default" else {**rope, **plain, "type": rope["rope_type"]}
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __contains__(self, name: str) -> bool:
        return name == "rope_scaling"


def make_bridge(
    config: Any, head: Head, dtype: torch.dtype, engine: bool, tensor_parallel: int, **settings: Any
) -> Any:
    """Return mbridge's object for this model, with ``settings`` of Megatron's ``TransformerConfig``.

    Args:
        engine: build the layers of Transformer Engine; else those of Megatron-Core and this package.
        tensor_parallel: the vocabulary is filled up to a multiple of it.
    """
    base: type[Bridge] = _MODEL_REGISTRY[config.model_type]
    direct = dict(base._DIRECT_MAPPING)  # mbridge changes the class's own for a tied model, and so every later one's
    if config.tie_word_embeddings:
        direct["output_layer.weight"] = direct["embedding.word_embeddings.weight"]
    if head is Head.VALUE:
        direct |= SCORE

    class Adapted(base):  # pyright: ignore[reportGeneralTypeIssues]
        _DIRECT_MAPPING = direct

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            return _layers(self.config, engine, vp_stage)

        _model_provider = LLMBridge._model_provider

        def _build_base_config(self, text_config_key: Any = None, **values: Any) -> Any:
            if "max_position_embeddings" in values:  # its name before Megatron-Core 0.14
                values["original_max_position_embeddings"] = values.pop("max_position_embeddings")
            return super()._build_base_config(text_config_key, **values)

        def _get_gptmodel_args(self) -> dict[str, Any]:
            return {
                "vocab_size": config.vocab_size,
                "max_sequence_length": config.max_position_embeddings,
                "position_embedding_type": "rope",
                "rotary_base": config.rope_theta,
                **_scaling(config.rope_parameters),
            }

    padding = tensor_parallel if config.vocab_size % tensor_parallel else None
    bridge = Adapted(_Readable(config), dtype=dtype, make_vocab_size_divisible_by=padding)
    bridge.set_extra_args(**settings)
    bridge.dtype = None  # weights keep theirs on the way
    bridge._weight_name_mapping_mcore_to_hf = cache(bridge._weight_name_mapping_mcore_to_hf)  # asked for at every sync
    return bridge


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "linear":
        return {"seq_len_interpolation_factor": rope["factor"]}
    if rope["rope_type"] == "llama3":
        return {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return {}


def _layers(config: Any, engine: bool, stage: int | None) -> Any:
    """The specification of this rank's layers: Transformer Engine's, or Megatron's with attention over packed rows."""
    block: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=stage
    )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if not engine:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            if config.multi_latent_attention:
                attention.q_layernorm = attention.kv_layernorm = RMSNorm
                attention.linear_q_down_proj = attention.linear_kv_down_proj = WholeLinear
            elif config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
        experts = layer.submodules.mlp.submodules
        if isinstance(experts, MoESubmodules):
            experts.router, experts.experts = Router, grouped_experts()
        if not engine or config.params_dtype == torch.float32:  # no fused kernel takes packed rows in fp32
            attention.core_attention = PackedAttention
    if not engine:
        block.layer_norm = RMSNorm
    return block


def build(bridge: Any, head: Head, tile: int, device: torch.device) -> list[MegatronModule]:
    """Build this rank's parts of the model, with weights that mean nothing, and :mod:`head` on the last one."""
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    provide = bridge._model_provider([])
    chunks = []
    for stage in range(virtual) if virtual else [None]:
        place = {"ignore_virtual": stage is None, "vp_stage": stage}
        last = parallel_state.is_pipeline_last_stage(**place)
        chunk = provide(parallel_state.is_pipeline_first_stage(**place), last, vp_stage=stage)
        chunk.vp_stage = stage
        if last:
            _set_head(chunk, head, bridge, tile, device)
        mark_whole(chunk)
        _set_latent_eps(chunk)
        for name, parameter in chunk.named_parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            if ".mlp.experts." in name:
                # an expert's gradient is summed over the ranks that have it; Megatron marks it so only where experts
                # are split, and forgets the tensor-parallel ranks that each have a part of the tokens otherwise
                parameter.allreduce = False
        chunks.append(chunk.to(device))
    return [Float16Module(bridge.config, chunk) if bridge.config.bf16 else chunk for chunk in chunks]


def mark_whole(chunk: torch.nn.Module) -> None:
    """Say of weights that every tensor-parallel rank has whole that they are.

    Transformer Engine's linear maps call every weight a part of one, also those of latent attention that are not split:
    Megatron counts them once a rank in the norm of the gradient.
    """
    for module in chunk.modules():
        if getattr(module, "parallel_mode", "none is set") is None:
            for parameter in module.parameters(recurse=False):
                setattr(parameter, "tensor_model_parallel", False)  # noqa: B010  # Megatron looks there


def _set_latent_eps(chunk: torch.nn.Module) -> None:
    for attention in chunk.modules():
        if isinstance(attention, MLASelfAttention):
            for part in attention.children():
                if hasattr(part, "eps"):  # a norm, or Transformer Engine's linear map with one in it
                    setattr(part, "eps", _LATENT_EPS)  # noqa: B010


def _set_head(chunk: Any, head: Head, bridge: Any, tile: int, device: torch.device) -> None:
    config = bridge.config
    if head is Head.VALUE:
        chunk.output_layer = ValueHead(config.hidden_size, config.params_dtype, device, config.sequence_parallel)
    else:
        chunk.output_layer.forward = LogprobHead(chunk.output_layer, bridge.vocab_size, tile)


def head_of(chunk: Any) -> LogprobHead | ValueHead:
    """What computes outputs on the last part of the model."""
    layer = chunk.output_layer
    return layer if isinstance(layer, ValueHead) else layer.forward


def untrained(bridge: Any) -> list[str]:
    """How names begin of tensors that a checkpoint may have, and that are neither trained nor exported."""
    config = bridge.hf_config
    return [f"model.layers.{config.num_hidden_layers}."] if config.model_type == LATENT else []


def hf_names(bridge: Any, name: str) -> list[str]:
    """The checkpoint's tensors that a parameter is made of."""
    return bridge._weight_name_mapping_mcore_to_hf(name)


def has_halves(name: str) -> bool:
    """Whether the parameter is a gate and an up of one matrix, one below the other on each tensor-parallel rank."""
    return name.rpartition(".")[0].endswith("linear_fc1") and "layer_norm" not in name


def to_megatron(bridge: Any, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Join the checkpoint's tensors of one parameter: the whole one of all tensor-parallel ranks."""
    return tensors[0] if _is_score(tensors[0]) else bridge._weight_to_mcore_format(name, tensors)


def to_hf(bridge: Any, name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Undo :func:`to_megatron`."""
    if _is_score(whole):
        return [(hf_names(bridge, name)[0], whole)]
    return list(zip(*bridge._weight_to_hf_format(name, whole), strict=True))


def _is_score(whole: torch.Tensor) -> bool:
    """Whether it is the value head's, whose one row mbridge takes for an output layer's without its padding."""
    return whole.shape[0] == 1


def split_tensor(bridge: Any, name: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Cut a whole parameter into those of ``size`` tensor-parallel ranks; ``part`` has the shape of one."""
    return list(bridge._weight_split_across_tp(name, whole, part, size))


def join_to_hf(bridge: Any, name: str, parts: torch.Tensor, part: Any) -> list[tuple[str, torch.Tensor]]:
    """Undo :func:`to_megatron` and :func:`split_tensor`; ``part`` says how it is split in ``partition_dim``.

    ``parts`` is [ranks, ...]. What follows each other in it is not copied.
    """
    if has_halves(name):  # copied once each
        halves = parts.unflatten(1, (2, -1)).transpose(0, 1)
        return list(zip(hf_names(bridge, name), (half.flatten(0, 1) for half in halves), strict=True))
    if part.partition_dim == 0:
        return to_hf(bridge, name, parts.flatten(0, 1))
    return to_hf(bridge, name, bridge._weight_merge_across_tp(name, list(parts.unbind()), part))
