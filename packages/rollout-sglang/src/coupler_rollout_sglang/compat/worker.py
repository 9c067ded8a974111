"""Reach the model in a process of SGLang's scheduler, and hook into it."""
# pyright: reportMissingImports=false
# The environment that is type-checked has no SGLang: its torch may be another.

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from coupler_rollout_sglang import messages


def register_sampler() -> None:
    """Let ``sampling_backend`` name our sampler.

    Its class is made in a scheduler alone, since it imports kernels.
    """
    from sglang.srt.layers.sampler import register_sampler_backend

    def factory() -> Any:
        from coupler_rollout_sglang.worker.sampler import CouplerSampler

        return CouplerSampler()

    register_sampler_backend(messages.SAMPLER, factory)


def hook_worker(around: Callable[..., None]) -> None:
    """Decide when a scheduler makes its worker, which takes the device."""
    _hook("sglang.srt.managers.tp_worker.TpModelWorker.__init__", around, "AROUND")


def hook_stop_tokens(around: Callable[..., set[int]]) -> None:
    """Decide which tokens of the model's folder end a completion.

    SGLang has one switch for these and for those of a request.
    """
    _hook("sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id", around, "AROUND")


def hook_payload(around: Callable[..., Any]) -> None:
    """Decide how the payload of a weight update is read, which SGLang unpickles."""
    _hook("sglang.srt.utils.common.MultiprocessingSerializer.deserialize", around, "AROUND")


def hook_answer(around: Callable[..., tuple[bool, str]]) -> None:
    """Decide what an update from tensors returns: success, and a message."""
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    _hook(f"{updater}.update_weights_from_tensor", around, "AROUND")


def hook_adapters(around: Callable[..., None]) -> None:
    """Decide how the tensors of an adapter are loaded that SGLang starts with."""
    _hook("sglang.srt.lora.lora_manager.LoRAManager.load_lora_weights", around, "AROUND")


def hook_facts(around: Callable[..., Any]) -> None:
    """Decide what a request for weights by name returns: rows of numbers."""
    _hook("sglang.srt.managers.tp_worker.BaseTpWorker.get_weights_by_name", around, "AROUND")


def hook_seeds(after: Callable[..., Any]) -> None:
    """Change the sampling parameters of a batch when they are made."""
    info = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    _hook(f"{info}.from_schedule_batch", after, "AFTER")


def hook_routes(after: Callable[..., Any]) -> None:
    """Change the experts of a batch when they were written down."""
    _hook("sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end", after, "AFTER")


def hook_quantization(around: Callable[..., None]) -> None:
    """Decide how a layer's weights become fp8 after they were loaded."""
    for method in ("Fp8LinearMethod", "Fp8MoEMethod"):
        target = f"sglang.srt.layers.quantization.fp8.{method}.process_weights_after_loading"
        _hook(target, around, "AROUND")


def hook_cache_scales(around: Callable[..., None]) -> None:
    """Decide the scales of the cache, which come with a model that is quantised."""
    method = "sglang.srt.layers.quantization.kv_cache.BaseKVCacheMethod"
    _hook(f"{method}.process_weights_after_loading", around, "AROUND")


def _hook(target: str, hook: Callable[..., Any], kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType[kind])


def rank() -> tuple[int, int]:
    """Return the worker's index in its replica, and the number of workers there."""
    group = _group()
    return group.rank_in_group, group.world_size


def gather(answer: Any) -> list[Any]:
    """Return the answers of all workers, in the order of their ranks.

    They are plain data and travel as JSON.
    """
    group = _group()
    if group.world_size == 1:
        return [answer]

    text = json.dumps(answer).encode()
    own = torch.frombuffer(
        bytearray(text),
        dtype=torch.uint8,
    )
    sizes = _everybodys(torch.tensor(len(text)))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(
        longest,
        dtype=torch.uint8,
    )
    padded[: len(text)] = own
    return [
        json.loads(bytes(one[:size].tolist()))
        for one, size in zip(
            _everybodys(padded),
            sizes,
            strict=True,
        )
    ]


def _everybodys(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all workers, which have one shape."""
    group = _group()
    found = [torch.empty_like(tensor) for _ in range(group.world_size)]
    torch.distributed.all_gather(
        found,
        tensor,
        group=group.cpu_group,
    )
    return found


def _group() -> Any:
    from sglang.srt.distributed import get_tp_group

    return get_tp_group()


def folder() -> str:
    """Return the model's folder."""
    from sglang.srt.runtime_context import get_model

    return get_model().model_path


def cache_tokens(worker: Any) -> int:
    """Return how many tokens a worker's cache has room for."""
    return int(worker.model_runner.max_total_num_tokens)


def routers_of(worker: Any) -> list[int]:
    """List the numbers of the layers whose router SGLang can write down."""
    from sglang.srt.layers.moe.topk import TopK

    modules = worker.model_runner.model.modules()
    numbers = {m.layer_id for m in modules if isinstance(m, TopK)}
    return sorted(int(number) for number in numbers if number is not None)


def adapters_of(updater: Any) -> Any:
    """Return the manager of adapters, or None if there is no room for one."""
    # 0.5.17 has the attribute where adapters were asked for.
    return getattr(updater.get_model_runner(), "lora_manager", None)


def adapted_layers(manager: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the weight of each layer that is ready for our adapter, and the places of
    its A and B.

    A layer is fused from one or several parts. A place is [parts x rank, in] for A, and
    [out, rank] for B.
    """
    from sglang.srt.lora.utils import LoRAType, get_target_module_name

    (ours,) = (key for key, ref in manager.lora_refs.items() if ref.lora_name == messages.ADAPTER)
    # It gets a place when a request first needs it, or now.
    manager.fetch_new_loras({ours})
    pool = manager.memory_pool
    place = pool.get_buffer_id(ours)

    for index, modules in enumerate(manager.lora_modules):
        for path, module in modules.items():
            name = get_target_module_name(path, pool.target_modules)
            a, b = (
                pool.get_tensor(name, index, half)[place]
                for half in (LoRAType.LORA_A, LoRAType.LORA_B)
            )
            yield module.base_layer.weight, a, b


def computes_weights(model: torch.nn.Module) -> bool:
    """Tell if the model computes further weights from those that were loaded."""
    return any(hasattr(module, "post_load_weights") for module in model.modules())
