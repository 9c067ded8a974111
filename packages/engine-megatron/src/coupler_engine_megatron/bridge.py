"""Wrap mbridge in a few functions, so that its successor can take its place.

No other module knows mbridge. It gives the model of a Hugging Face folder in
Megatron-Core's layers, and says how Megatron-Core's parameters are made of a
checkpoint's tensors. Names here are those that the layers of Transformer Engine give
their parameters, with the numbers of layers and experts of the whole model.
:mod:`coupler_engine_megatron.weights` translates others.
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

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
"""Model types whose log-probs and weights are tested."""
WEIGHT = {"output_layer.weight": "score.weight"}
SCORE: dict[Head, dict[str, str]] = {
    Head.LM: {},
    Head.SCORE: WEIGHT,
    Head.VALUE: {**WEIGHT, "output_layer.bias": "score.bias"},
}
LATENT = "deepseek_v3"
"""The model type with multi-head latent attention, and routers with a bias."""
_ROPE = {"default", "linear", "llama3"}
_LATENT_ROPE = {"default", "yarn"}
_LATENT_EPS = 1e-6
"""Epsilon of transformers' norms within latent attention, for any rms_norm_eps."""
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_config(model: Model) -> Any:
    """Read the folder's configuration.

    A model whose log-probs would silently differ from transformers' is refused.

    Raises:
        CouplerError: there is no such folder, or the engine cannot train this model;
            the message says why.
    """
    if not Path(model.path).is_dir():
        raise CouplerError(
            f"model.path={model.path} is not a folder.\n  try:  a folder with config.json and "
            "safetensors"
        )

    # This is transformers' own boundary: a broken folder raises OSError, ValueError,
    # KeyError and others.
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        raise CouplerError(f"model.path={model.path} cannot be read: {error}") from error

    kind = config.model_type
    if kind not in FAMILIES:
        raise CouplerError(
            f"engine=megatron cannot train model.path of type {kind!r}.\n  it trains:  "
            f"{', '.join(FAMILIES)}"
        )
    rope = config.rope_parameters
    embedding = rope["rope_type"]
    scaled = embedding == "llama3" and any(rope[key] != value for key, value in _LLAMA3.items())
    problems = {
        "its checkpoint is quantized": hasattr(config, "quantization_config"),
        f"its activation is {config.hidden_act!r}": config.hidden_act != "silu",
        "it has sliding-window attention": bool(getattr(config, "use_sliding_window", False)),
        f"its rotary embedding is of type {embedding!r}": (
            embedding not in (_LATENT_ROPE if kind == LATENT else _ROPE)
        ),
        "its llama3 rotary embedding has other factors than Llama 3's": scaled,
        "its tokens go to one expert each (num_experts_per_tok=1)": (
            getattr(config, "num_experts_per_tok", 0) == 1
        ),
        **(_latent_problems(config) if kind == LATENT else {}),
    }

    for why, holds in problems.items():
        if holds:
            raise CouplerError(f"engine=megatron cannot train model.path of type {kind!r}: {why}.")
    # mbridge looks for it here.
    config.rope_theta = rope["rope_theta"]
    # A critic has no head to tie.
    if model.head is not Head.LM:
        config.tie_word_embeddings = False
    return config


def _latent_problems(config: Any) -> dict[str, bool]:
    """Name what mbridge and Megatron-Core would misread in a model like DeepSeek-V3."""
    limited, rope = config.n_group > 1, config.rope_parameters
    yarn = rope["rope_type"] == "yarn"
    return {
        "its rotary embedding is not interleaved": not config.rope_interleave,
        "the weights of its experts are not normalised": not config.norm_topk_prob,
        "its router does not judge groups of experts by the best two": (
            limited and config.num_experts_per_tok != 2 * config.topk_group
        ),
        "its yarn rotary embedding has an attention_factor of its own": (
            yarn and rope.get("attention_factor") is not None
        ),
        "its yarn rotary embedding is not truncated (truncate=false)": (
            yarn and not rope.get("truncate", True)
        ),
        "its yarn rotary embedding has mscale_all_dim and no mscale": (
            yarn and bool(rope.get("mscale_all_dim")) and not rope.get("mscale")
        ),
    }


class _Readable:
    """A configuration as mbridge reads it.

    It can be searched with ``in``, and has no layers that predict further tokens.
    """

    def __init__(self, config: Any) -> None:
        rope = config.rope_parameters
        # Without mscale_all_dim, transformers reads no mscale, and mbridge fills in 1
        # for each.
        plain = {} if rope.get("mscale_all_dim") else {"mscale": 1.0, "mscale_all_dim": 0.0}
        self.rope_scaling = None
        if rope["rope_type"] != "default":
            self.rope_scaling = {**rope, **plain, "type": rope["rope_type"]}
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __contains__(self, name: str) -> bool:
        return name == "rope_scaling"


def make_bridge(
    config: Any,
    head: Head,
    dtype: torch.dtype,
    engine: bool,
    tensor_parallel: int,
    plain: bool = False,
    **settings: Any,
) -> Any:
    """Return mbridge's object for this model.

    Args:
        engine: build the layers of Transformer Engine; else those of Megatron-Core and
            this package.
        plain: build linear maps apart from the norms before them, in Megatron-Core's
            own layers, as updates of them need it. Attention is still Transformer
            Engine's.
        tensor_parallel: the vocabulary is filled up to a multiple of it.
        settings: values of Megatron's ``TransformerConfig``.
    """
    base: type[Bridge] = _MODEL_REGISTRY[config.model_type]
    # mbridge would change the class's own mapping for a tied model, and so every later
    # model's.
    direct = dict(base._DIRECT_MAPPING)
    if config.tie_word_embeddings:
        direct["output_layer.weight"] = direct["embedding.word_embeddings.weight"]
    direct |= SCORE[head]

    class Adapted(base):  # pyright: ignore[reportGeneralTypeIssues]
        _DIRECT_MAPPING = direct

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            return _layers(self.config, engine, plain, vp_stage)

        _model_provider = LLMBridge._model_provider

        def _build_base_config(self, text_config_key: Any = None, **values: Any) -> Any:
            # This was its name before Megatron-Core 0.14.
            if "max_position_embeddings" in values:
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
    # Weights keep their dtype on the way.
    bridge.dtype = None
    # It is asked for at every sync.
    bridge._weight_name_mapping_mcore_to_hf = cache(bridge._weight_name_mapping_mcore_to_hf)
    return bridge


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "linear":
        return {"seq_len_interpolation_factor": rope["factor"]}
    if rope["rope_type"] == "llama3":
        return {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return {}


def _layers(config: Any, engine: bool, plain: bool, stage: int | None) -> Any:
    """Return the specification of this rank's layers.

    They are Transformer Engine's, or Megatron's with attention over packed rows.
    """
    packed = not engine or config.params_dtype == torch.float32
    engine = engine and not plain

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

        # No fused kernel takes packed rows in fp32.
        if packed:
            attention.core_attention = PackedAttention
        elif plain:
            attention.core_attention = fused_attention()

    if not engine:
        block.layer_norm = RMSNorm
    return block


def fused_attention() -> Any:
    """Return Transformer Engine's attention, which exists on a GPU alone."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention


def build(bridge: Any, head: Head, tile: int, device: torch.device) -> list[MegatronModule]:
    """Build this rank's parts of the model, with weights that mean nothing.

    The last part gets a head of :mod:`head`.
    """
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
            # An expert's gradient is summed over the ranks that have it. Megatron marks
            # it so only if experts are split, and otherwise forgets the tensor-parallel
            # ranks that each have a part of the tokens.
            if ".mlp.experts." in name:
                parameter.allreduce = False
        chunks.append(chunk.to(device))

    half = bridge.config.bf16
    return [Float16Module(bridge.config, chunk) if half else chunk for chunk in chunks]


def mark_whole(chunk: torch.nn.Module) -> None:
    """Mark the weights that every tensor-parallel rank has whole.

    Transformer Engine's linear maps call every weight a part of one, also those of
    latent attention that are not split. Megatron would count these once a rank in the
    norm of the gradient.
    """
    for module in chunk.modules():
        if getattr(module, "parallel_mode", "none is set") is None:
            for parameter in module.parameters(recurse=False):
                setattr(parameter, "tensor_model_parallel", False)  # noqa: B010  # Megatron looks there


def _set_latent_eps(chunk: torch.nn.Module) -> None:
    for attention in chunk.modules():
        if isinstance(attention, MLASelfAttention):
            for part in attention.children():
                # It is a norm, or Transformer Engine's linear map with one in it.
                if hasattr(part, "eps"):
                    setattr(part, "eps", _LATENT_EPS)  # noqa: B010


def _set_head(chunk: Any, head: Head, bridge: Any, tile: int, device: torch.device) -> None:
    config = bridge.config
    if head is not Head.LM:
        chunk.output_layer = ValueHead(
            config.hidden_size,
            config.params_dtype,
            device,
            config.sequence_parallel,
            bias=head is Head.VALUE,
        )

    else:
        chunk.output_layer.forward = LogprobHead(chunk.output_layer, bridge.vocab_size, tile)


def head_of(chunk: Any) -> LogprobHead | ValueHead:
    """Return the object that computes outputs on the last part of the model."""
    layer = chunk.output_layer
    return layer if isinstance(layer, ValueHead) else layer.forward


def untrained(bridge: Any) -> list[str]:
    """List the prefixes of tensors that a checkpoint may have and nobody trains or
    exports.
    """
    config = bridge.hf_config
    return [f"model.layers.{config.num_hidden_layers}."] if config.model_type == LATENT else []


def hf_names(bridge: Any, name: str) -> list[str]:
    """Name the checkpoint's tensors that a parameter is made of."""
    return bridge._weight_name_mapping_mcore_to_hf(name)


def has_halves(name: str) -> bool:
    """Tell if the parameter is a gate above an up on each tensor-parallel rank."""
    return name.rpartition(".")[0].endswith("linear_fc1") and "layer_norm" not in name


def to_megatron(bridge: Any, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Join the checkpoint's tensors of one parameter.

    The result is the whole parameter of all tensor-parallel ranks.
    """
    return tensors[0] if _is_score(tensors[0]) else bridge._weight_to_mcore_format(name, tensors)


def to_hf(bridge: Any, name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Undo :func:`to_megatron`."""
    if _is_score(whole):
        return [(hf_names(bridge, name)[0], whole)]
    return list(zip(*bridge._weight_to_hf_format(name, whole), strict=True))


def _is_score(whole: torch.Tensor) -> bool:
    """Tell if it is the value head's.

    mbridge takes its one row for an output layer's without its padding.
    """
    return whole.shape[0] == 1


def split_tensor(
    bridge: Any, name: str, whole: torch.Tensor, part: torch.Tensor, size: int
) -> list[torch.Tensor]:
    """Cut a whole parameter into those of ``size`` tensor-parallel ranks.

    ``part`` has the shape of one of them.
    """
    return list(bridge._weight_split_across_tp(name, whole, part, size))


def join_to_hf(
    bridge: Any, name: str, parts: torch.Tensor, part: Any
) -> list[tuple[str, torch.Tensor]]:
    """Undo :func:`to_megatron` and :func:`split_tensor`.

    Rows that follow each other are not copied.

    Args:
        parts: [ranks, ...].
        part: says in ``partition_dim`` how the parameter is split.
    """
    # Gates and ups are copied once each.
    if has_halves(name):
        halves = parts.unflatten(1, (2, -1)).transpose(0, 1)
        joined = (half.flatten(0, 1) for half in halves)
        return list(zip(hf_names(bridge, name), joined, strict=True))
    if part.partition_dim == 0:
        return to_hf(bridge, name, parts.flatten(0, 1))
    return to_hf(bridge, name, bridge._weight_merge_across_tp(name, list(parts.unbind()), part))
