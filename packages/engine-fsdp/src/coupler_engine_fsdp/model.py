"""Build the policy from a transformers causal LM, and shard it with FSDP2.

The model is built on meta, and its head computes log-probs in tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coupler.errors import CouplerError
from coupler.interfaces import Head as HeadKind
from coupler.interfaces import Model
from coupler_engine_fsdp import attention
from coupler_engine_fsdp.logprobs import token_logprobs, top_ids
from coupler_engine_fsdp.packing import Packed
from coupler_engine_fsdp.value import ValueHead, ValueModel
from coupler_engine_fsdp.weights import is_exact

# Applied to logits after the head.
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")
# Their frequencies depend on the longest sequence of a micro-batch.
_POSITION_DEPENDENT_ROPE = ("dynamic", "longrope")


class Head(nn.Linear):
    """The language-model head, which returns log-probs if it gets targets."""

    tile: int

    def forward(
        self, input: Tensor, packed: Packed | None = None, want: frozenset[str] = frozenset()
    ) -> Any:
        """Map [R, H] hidden states to log-probs [R], and what else is wanted, by name.

        What is not wanted is None. Without ``packed`` it returns logits.
        """
        if packed is None:
            return super().forward(input)

        ids = packed.ids
        if packed.top_k:
            ids = top_ids(
                input,
                self.weight,
                self.bias,
                packed.top_k,
                self.tile,
                packed.kept,
            )

        logprobs, entropy, squares, at_ids = token_logprobs(
            input,
            self.weight,
            self.bias,
            packed.targets,
            packed.temperature,
            "entropy" in want,
            self.tile,
            packed.kept,
            "sum_pi_squared" in want,
            ids if "top_logprobs" in want else None,
        )
        return {
            "logprobs": logprobs,
            "entropy": entropy,
            "sum_pi_squared": squares,
            "top_ids": ids,
            "top_logprobs": at_ids,
        }


class Policy(nn.Module):
    """The module that FSDP wraps.

    One forward goes from tokens to log-probs, so that FSDP's hooks gather every
    parameter.
    """

    def __init__(self, causal: PreTrainedModel, tile: int) -> None:
        super().__init__()
        self.causal = causal
        _replace_head(causal, tile)

    @property
    def head(self) -> Head:
        head = self.causal.get_output_embeddings()
        assert isinstance(head, Head)
        return head

    def forward(
        self, packed: Packed, want: frozenset[str] = frozenset(), logits: bool = False
    ) -> Any:
        """Return log-probs [R] of the predicted rows and, if wanted, entropy [R], sums
        of squared probabilities [R], most likely ids [R, k] and log-probs of ids
        [R, k], by name.

        With ``logits`` it returns all logits [N, V].
        """
        arguments = {
            "input_ids": packed.tokens,
            "position_ids": packed.positions,
            "use_cache": False,
            "packing": packed.packing,
        }

        if logits:
            return self.causal(**arguments).logits[0]
        hidden = self.causal.base_model(**arguments).last_hidden_state[0]
        return self.head(hidden[packed.sources], packed, want)

    def names(self, files: Mapping[str, Any]) -> list[str]:
        """Return the names of its tensors in a checkpoint."""
        return list(files)


def build(model: Model, tile: int, recomputed: int | None) -> Policy | ValueModel:
    """Build the model of ``model.path`` in fp32 on the meta device.

    Args:
        tile: most elements of the fp32 logits at a time.
        recomputed: how many of the first layers compute their activations again in the
            backward pass. None is all of them.

    Raises:
        CouplerError: there is no such folder, the engine cannot train this model, or it
            has fewer layers.
    """
    if not Path(model.path).is_dir():
        raise CouplerError(
            f"model.path={model.path} is not a folder.\n  try:  a folder with config.json and "
            "safetensors"
        )

    attention.register()
    # This is transformers' own boundary: a broken folder raises OSError, ValueError,
    # KeyError and others.
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        _refuse(config)
        _drop_nothing(config.get_text_config())
        # A critic has no head to tie.
        if model.head is not HeadKind.LM:
            config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention.NAME,
                trust_remote_code=model.trust_remote_code,
            )
    except CouplerError:
        raise
    except Exception as error:
        raise CouplerError(f"model.path={model.path} cannot be built: {error}") from error

    if not causal.is_backend_compatible():
        raise _unsupported(config, "its attention cannot be replaced by one that packs sequences")
    attention.mark_local(causal)

    if recomputed != 0 and not causal.supports_gradient_checkpointing:
        raise CouplerError(
            f"engine.gradient_checkpointing: layers of type {config.model_type!r} cannot compute "
            "their activations again.\n  try:  engine.gradient_checkpointing=false"
        )
    if recomputed != 0:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    _buffer_exact(causal)
    # A model's own code may drop what no configuration says.
    for module in causal.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if model.head is HeadKind.LM:
        built = Policy(causal, tile)
    else:
        built = ValueModel(causal, bias=model.head is HeadKind.VALUE)
    if recomputed:
        _keep_after(built, recomputed)
    # Transformers checkpoints activations in training mode only.
    return built.train()


def _refuse(config: Any) -> None:
    """Refuse a model whose log-probs would silently differ from transformers' own."""
    text = config.get_text_config()
    if hasattr(config, "quantization_config"):
        raise _unsupported(config, "its checkpoint is quantized")

    for name in _LOGIT_CHANGES:
        if getattr(text, name, None) not in (None, 1.0):
            raise _unsupported(config, f"it has {name}={getattr(text, name)}")

    if rope := position_dependent_rope(text):
        raise _unsupported(
            config,
            f"its rotary embedding of type {rope!r} depends on the other sequences of a batch",
        )


def position_dependent_rope(text: Any) -> str:
    """Return the type of a rotary embedding that depends on the longest sequence of a
    batch, or an empty text.

    A configuration has the parameters of all layers, or of each kind of layers.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = (rope, *(each for each in rope.values() if isinstance(each, dict)))
    types = (kind.get("rope_type") for kind in kinds)
    return next((each for each in types if each in _POSITION_DEPENDENT_ROPE), "")


def _drop_nothing(text: Any) -> None:
    """Set every rate of dropout to 0: a log-prob is one of the distribution that is
    sampled.

    Many layers drop by a function with a rate of the configuration, not by a module.
    """
    for name, value in vars(text).items():
        if "drop" in name and isinstance(value, float):
            setattr(text, name, 0.0)


def _buffer_exact(causal: PreTrainedModel) -> None:
    """Make buffers of parameters that are never rounded.

    They get no gradient, and FSDP casts parameters alone.
    """
    for module in causal.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_exact(name):
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


def _unsupported(config: Any, why: str) -> CouplerError:
    return CouplerError(
        f"engine=fsdp cannot train model.path of type {config.model_type!r}: {why}."
    )


def _replace_head(causal: PreTrainedModel, tile: int) -> None:
    old = causal.get_output_embeddings()
    if type(old) is not nn.Linear:
        raise _unsupported(
            causal.config, f"its head is a {type(old).__name__}, not one linear layer"
        )
    head = Head(
        old.in_features, old.out_features, old.bias is not None, device="meta", dtype=torch.float32
    )
    head.tile = tile
    causal.set_output_embeddings(head)
    causal.tie_weights()


def layers_of(policy: Policy | ValueModel) -> list[nn.Module]:
    """Return the transformer layers, which are compiled, sharded and recomputed as one.

    Raises:
        CouplerError: the model does not say which modules are its layers.
    """
    names = set(policy.causal._no_split_modules or ())
    layers = [module for module in policy.causal.modules() if type(module).__name__ in names]
    if not layers:
        raise _unsupported(policy.causal.config, "it does not name its layers in _no_split_modules")
    return layers


def recomputes(layer: nn.Module) -> bool:
    """Tell whether a layer computes its activations again in the backward pass."""
    return getattr(layer, "gradient_checkpointing", False)


def can_choose(policy: Policy | ValueModel) -> bool:
    """Tell whether each layer says for itself if it recomputes, as transformers' do."""
    return all(hasattr(layer, "gradient_checkpointing") for layer in layers_of(policy))


def _keep_after(policy: Policy | ValueModel, recomputed: int) -> None:
    """Let layers after the first ``recomputed`` ones keep their activations.

    Those of the first layers would be kept longest, since the backward pass begins with
    the last ones.
    """
    layers: list[Any] = layers_of(policy)
    if recomputed > len(layers):
        raise CouplerError(
            f"engine.recompute_num_layers must be at most {len(layers)}, the layers of "
            f"model.path, got {recomputed}."
        )
    if not can_choose(policy):
        raise CouplerError(
            f"engine.recompute_num_layers={recomputed} needs layers that recompute one by one, "
            f"and those of model type {policy.causal.config.model_type!r} do not.\n"
            "  try:  engine.recompute_num_layers=0, which recomputes all of them"
        )

    for layer in layers[recomputed:]:
        layer.gradient_checkpointing = False


def compile_layers(policy: Policy | ValueModel) -> None:
    """Compile the layers once for all lengths.

    Hooks of FSDP and of recomputation stay outside.
    """
    for layer in layers_of(policy):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def shard(
    policy: Policy | ValueModel, mesh: DeviceMesh, compute: torch.dtype, reshard_after_forward: bool
) -> list[FSDPModule]:
    """Shard each transformer layer, embeddings and head if they are two, and the rest.

    Gradients are summed over all ranks, in fp32.
    """
    causal = policy.causal
    units = layers_of(policy)
    if causal.get_input_embeddings().weight is not policy.head.weight:
        units += [causal.get_input_embeddings(), policy.head]

    def precision(unit: nn.Module) -> MixedPrecisionPolicy:
        dtype = torch.float32 if isinstance(unit, ValueHead) else compute
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)

    sharded = [
        fully_shard(
            unit, mesh=mesh, mp_policy=precision(unit), reshard_after_forward=reshard_after_forward
        )
        for unit in (*reversed(units), policy)
    ]

    for module in sharded:
        # Set on the root alone, the others would keep the mean.
        module.set_gradient_divide_factor(1.0)
        # gloo has no sum with a factor.
        module.set_force_sum_reduction_for_comms(True)
    return sharded


def materialise(policy: Policy | ValueModel, device: torch.device) -> None:
    """Allocate the shards on ``device``, and compute the buffers that no checkpoint
    holds.

    Rotary frequencies are such buffers.

    Raises:
        CouplerError: a buffer cannot be computed.
    """
    causal = policy.causal
    policy.to_empty(device=device)
    # A plain parameter that has two names is two tensors after to_empty.
    causal.tie_weights()

    # A buffer that stays NaN was not computed.
    derived = dict(causal.named_non_persistent_buffers())
    for buffer in derived.values():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)

    owners = {name.rpartition(".")[0] for name in derived}
    with torch.no_grad():
        for owner in owners:
            causal._init_weights(causal.get_submodule(owner))

    unset = [
        name
        for name, buffer in derived.items()
        if buffer.is_floating_point() and not buffer.isfinite().all()
    ]
    if unset:
        raise _unsupported(
            causal.config,
            f"transformers does not say how to compute its buffers {', '.join(unset)}",
        )
