"""Reach the model and the adapter of a vLLM worker, in the worker's process."""
# pyright: reportMissingImports=false
# The environment that is type-checked has no vLLM: its torch may be another.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from typing import Any

import torch

from coupler.engine_kit.inference.loading import as_tensor
from coupler.engine_kit.lora_names import names_of
from coupler_rollout_vllm.compat import ADAPTER

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


def rank_of(worker: Any) -> tuple[int, int]:
    """Return the worker's index in its replica, and the number of workers there."""
    return worker.rank, worker.parallel_config.world_size


def model_of(worker: Any) -> torch.nn.Module:
    return worker.model_runner.get_model()


def folder_of(worker: Any) -> str:
    return worker.model_config.model


def routers_of(worker: Any) -> list[int]:
    """List the numbers of the layers that have a router."""
    modules: list[Any] = list(model_of(worker).modules())
    return sorted(
        {int(m.layer_id) for m in modules if hasattr(m, "router") and hasattr(m, "layer_id")}
    )


@contextmanager
def configured(worker: Any) -> Iterator[Any]:
    """Give the model as its loaders expect it.

    They look up the configuration, and find each layer without its wrapper for
    adapters.
    """
    from vllm.config import set_current_vllm_config

    model = model_of(worker)
    with set_current_vllm_config(worker.vllm_config), _unwrapped(model):
        yield model


@contextmanager
def _unwrapped(model: Any) -> Iterator[None]:
    """Take the wrappers off layers that are ready for an adapter, and put them back.

    Loaders know a layer by its name in the model, where a wrapped layer has another
    name.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    found = model.named_modules(remove_duplicate=False)
    wrappers = {name: module for name, module in found if isinstance(module, BaseLayerWithLoRA)}
    for name, wrapper in wrappers.items():
        model.set_submodule(name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper)


def packs(worker: Any) -> bool:
    """Tell if a layer may keep its weights in another shape than they were loaded in.

    On the CPU every layer does. On a GPU, plain linear layers and embeddings do not.
    Any other layer counts as one that does, since we do not know.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if not torch.cuda.is_available():
        return True

    modules = list(model_of(worker).modules())
    methods = {
        type(m.quant_method) for m in modules if getattr(m, "quant_method", None) is not None
    }
    others = {type(m) for m in modules if hasattr(m, "process_weights_after_loading")} - {Attention}
    return bool(methods - {UnquantizedLinearMethod, UnquantizedEmbeddingMethod} or others)


@contextmanager
def reloading(worker: Any) -> Iterator[Any]:
    """Give the model, ready for ``load_weights``.

    Afterwards its layers are packed as their kernels want them.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with configured(worker) as model, _quiet(LAYERWISE):
        _forget_expert_kernels(model)
        initialize_layerwise_reload(model)
        try:
            yield model
        finally:
            finalize_layerwise_reload(model, worker.model_config)
            _tie(model)


def _forget_expert_kernels(model: Any) -> None:
    """Let each load on the CPU make the kernel of experts anew.

    Experts are packed when their kernel is made, and at no later load.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence the logger of this name below errors.

    vLLM warns of a tied head that gets no weights, and the receipt tells the rest.
    """
    logger = getLogger(name)
    before = logger.level
    logger.setLevel(ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def unfilled(model: Any) -> frozenset[str]:
    """Name the parameters that no tensor of a checkpoint fills: tied heads."""
    return frozenset(f"{name}.weight" for name in _tied_heads(model))


def _tied_heads(model: Any) -> list[str]:
    if not model.config.get_text_config().tie_word_embeddings:
        return []
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "lm_head"]


def _tie(model: Any) -> None:
    """Give a tied head the embedding's weights. On the CPU it packs its own copy."""
    modules = dict(model.named_modules())
    for name in _tied_heads(model):
        head = modules[name]
        (embedding,) = (
            m for path, m in modules.items() if path.rpartition(".")[2] == "embed_tokens"
        )
        if head is not embedding:
            head.weight = embedding.weight
            head.quant_method.process_weights_after_loading(head)


def kept(tensor: Any) -> torch.Tensor:
    """Copy a received tensor, since layers hold on to parts until they have all."""
    return as_tensor(tensor).clone()


def adapter_room(worker: Any) -> int:
    """Return the highest rank of an adapter that the worker runs, or 0 for none."""
    lora = worker.vllm_config.lora_config
    return lora.max_lora_rank if lora else 0


def adapter_places(worker: Any) -> dict[str, torch.Tensor]:
    """Return the place that each tensor of an adapter is copied to, by its name.

    The shape of a place is [1, 1, rank, in] for A, and [1, 1, out, rank] for B.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    manager = _manager(worker)
    places = {}
    for name, layer in manager.modules.items():
        if isinstance(layer, BaseLinearLayerWithLoRA):
            parts = manager.packed_modules.get(name, [name])
            for part, a, b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=False):
                places |= zip(names_of(part), (a, b), strict=True)
    return places


def put_adapter(worker: Any, tensors: dict[str, torch.Tensor], rank: int) -> None:
    """Make these tensors the worker's only adapter. Each B holds its scale already."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    drop_adapters(worker)

    if tensors:
        manager = _manager(worker)
        peft = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
        adapter = LoRAModel.from_lora_tensors(ADAPTER, tensors, peft, device=str(worker.device))
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER)
        adapter.loras.clear()  # The layers hold copies.


def drop_adapters(worker: Any) -> None:
    """Forget every adapter, and the map of tokens to adapters.

    The map lies on the device, and memory that slept has lost it.
    """
    manager = _manager(worker)
    manager.remove_all_adapters()

    # Releases before 0.32 take the last map for the one that the device still has.
    manager._last_mapping = None


def in_model(worker: Any, name: str) -> str:
    """Translate the name of an adapter's tensor from the checkpoint to vLLM's model."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    # Fused layers keep the names of their parts: vLLM packs them itself.
    mapper: Any = getattr(model_of(worker), "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapper = (
            mapper.get_rename_mapper()
            if hasattr(mapper, "get_rename_mapper")
            else mapper.get_unstacked_mapper()
        )

    try:
        module, is_a = parse_fine_tuned_lora_name(name, mapper)
    except ValueError:  # The name is not that of an adapter's tensor.
        return name
    return names_of(module)[0 if is_a else 1]


def _manager(worker: Any) -> Any:
    return worker.model_runner.lora_manager._adapter_manager


def on_device(worker: Any, tensor: Any) -> torch.Tensor:
    """Copy a received tensor in the way that the layers of an adapter hold theirs."""
    dtype = worker.vllm_config.lora_config.lora_dtype
    return as_tensor(tensor).to(
        worker.device, dtype, copy=True, memory_format=torch.contiguous_format
    )
