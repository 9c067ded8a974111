"""Build the rollout's model with dummy weights, and fill it by name.

It attends through a cache of aligned columns.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.initialization import no_init_weights

from coupler.engine_kit.precision import Precision, dtype_of
from coupler.errors import CouplerError
from coupler.interfaces import Model, Named, Rank, SyncReceipt
from coupler_engine_fsdp.distributed import prepare_device
from coupler_engine_fsdp.model import position_dependent_rope
from coupler_engine_fsdp.rollout_columns import (
    Shape,
    attend_columns,
    cache_arguments,
    mask_per_head,
)
from coupler_engine_fsdp.weights import is_exact

ATTENTION = "coupler_columns"
# Elements that dummy weights repeat.
BLOCK = 1 << 16
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Arguments that change what attention computes."""


def build(model: Model, dtype: Precision, rank: Rank) -> PreTrainedModel:
    """Build the model of this folder's ``config.json`` with dummy weights.

    Its checkpoint is not opened. Small random numbers take the place of the family's
    own initialization, which would take seconds and be overwritten.

    Raises:
        CouplerError: this family caches something else than one growing key and value
            tensor per layer.
    """
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    refuse_unsupported(config)
    device = prepare_device(rank)
    AttentionInterface.register(ATTENTION, attend)

    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        device,
        no_init_weights(),
    ):
        built = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype_of(dtype, device),
            attn_implementation=ATTENTION,
            trust_remote_code=model.trust_remote_code,
        )

    if not built.is_backend_compatible():
        raise unsupported(
            config, "its attention cannot be replaced by one over the rollout's cache"
        )
    built.tie_weights()
    for name, tensor in built.state_dict(keep_vars=True).items():
        if is_exact(name):
            tensor.data = tensor.data.float()
    fill(built.requires_grad_(False).parameters(), rank.seed)
    return built.eval()


def fill(parameters: Iterable[Tensor], seed: int) -> None:
    """Write a block of normal numbers, of standard deviation 0.02, again and again."""
    generator = torch.Generator().manual_seed(seed)
    block = 0.02 * torch.randn(BLOCK, generator=generator)

    for parameter in parameters:
        flat = parameter.view(-1)
        whole = len(flat) // BLOCK * BLOCK
        flat[:whole].view(-1, BLOCK).copy_(block)
        flat[whole:].copy_(block[: len(flat) - whole])


def refuse_unsupported(config: PreTrainedConfig) -> None:
    text = config.get_text_config()
    layers = DynamicCache(config=text).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})

    if odd:
        raise unsupported(
            config,
            f"it caches in {', '.join(odd)}, and only layers that attend to all earlier "
            "tokens run here",
        )
    if rope := position_dependent_rope(text):
        raise unsupported(
            config,
            f"its rotary embedding of type {rope!r} depends on the other sequences of a batch",
        )


def unsupported(config: PreTrainedConfig, why: str) -> CouplerError:
    return CouplerError(
        f"rollout=hf cannot run a model of type {config.model_type!r}: {why}.\n  try:  rollout=vllm"
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend [n, heads, queries, D] x [n, kv heads, keys, D] -> [n, queries, heads, D].

    Transformers calls it. Without a mask, whole prompts attend causally. With one, one
    query per row attends over the running batch's cache.
    """
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise unsupported(cast(PreTrainedConfig, module.config), f"its attention uses {name!r}")

    n, heads, queries, _ = query.shape
    if mask is None:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != key.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None

    kv_heads = key.shape[1]
    grouped = query.reshape(n * kv_heads, heads // kv_heads, -1)
    out = attend_columns(
        grouped, key.flatten(0, 1), value.flatten(0, 1), mask_per_head(mask, kv_heads), scaling
    )
    return out.view(n, queries, heads, -1), None


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that :func:`load_named` fills, by its names."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    prefix = f"{model.base_model_prefix}."
    return shapes | {name.removeprefix(prefix): shape for name, shape in shapes.items()}


def load_named(model: PreTrainedModel, named: Iterable[Named], version: int) -> SyncReceipt:
    """Copy tensors into the model by their checkpoint names.

    The tensors have the shapes of :func:`shapes_of`. A name that is tied to another
    reaches both.
    """
    targets = model.state_dict(keep_vars=True)
    reached: set[int] = set()
    received = size = 0
    unexpected: list[str] = []
    start = copied = time.perf_counter()
    copying = 0.0

    with torch.no_grad():
        for name, value in named:
            copied = time.perf_counter()
            tensor = torch.as_tensor(value)
            received, size = received + 1, size + tensor.numel() * tensor.element_size()
            target = targets.get(name, targets.get(f"{model.base_model_prefix}.{name}"))
            if target is None:
                unexpected.append(name)
                continue
            target.copy_(tensor)
            reached.add(id(target))
            copying += time.perf_counter() - copied

    missing = {
        id(target): name for name, target in reversed(targets.items()) if id(target) not in reached
    }
    seconds = {"load": copying, "receive": time.perf_counter() - start - copying}
    return SyncReceipt(
        version,
        received,
        received - len(unexpected),
        size,
        tuple(reversed(missing.values())),
        tuple(unexpected),
        seconds,
    )


def load_folder(model: PreTrainedModel, folder: Path) -> None:
    """Fill the model with the weights of its folder.

    Raises:
        CouplerError: the folder lacks a weight, or holds one that the model has not.
    """

    def stored() -> Iterator[Named]:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    found = load_named(model, stored(), 0)
    if found.missing or found.unexpected:
        lost = f"lacks {found.missing[0]}" if found.missing else f"holds {found.unexpected[0]}"
        raise CouplerError(
            f"the weights of {folder} do not fit its config.json: it {lost}, among "
            f"{len(found.missing) + len(found.unexpected)} of the kind.\n"
            "  try:  saving the model again, or rollout=vllm"
        )


def free_weights(model: PreTrainedModel) -> list[tuple[torch.UntypedStorage, int]]:
    """Give the memory of every parameter back. Views and ties stay.

    Returns:
        The storages and their sizes, as :func:`allocate_weights` takes them.
    """
    parameters = (parameter.untyped_storage() for parameter in model.parameters())
    storages = {storage.data_ptr(): storage for storage in parameters}
    freed = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage in storages.values():
        storage.resize_(0)
    return freed


def allocate_weights(freed: list[tuple[torch.UntypedStorage, int]]) -> None:
    """Give parameters memory again, with undefined contents."""
    for storage, size in freed:
        storage.resize_(size)


def cache_shape(model: PreTrainedModel) -> Shape:
    """Run one token to see what the model caches.

    Raises:
        CouplerError: layers differ in what they cache, or keys from values.
    """
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, position_ids=token, **cache_arguments(model, cache))

    layers = cast(list[DynamicLayer], cache.layers)
    shapes = {
        cast(Tensor, tensor).shape for layer in layers for tensor in (layer.keys, layer.values)
    }
    if len(shapes) > 1:
        raise unsupported(
            model.config,
            f"its layers cache tensors of different shapes, {sorted(map(tuple, shapes))}",
        )
    _, heads, _, dim = shapes.pop()
    return Shape(len(cache.layers), heads, dim, model.dtype, model.device)
