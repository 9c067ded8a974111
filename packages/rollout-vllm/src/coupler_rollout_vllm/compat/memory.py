"""Give back and take device memory by vLLM's allocator, in a model worker's process."""
# pyright: reportMissingImports=false
# The environment that is type-checked has no vLLM: its torch may be another.

from __future__ import annotations

from typing import Any

import torch


def sleeps(worker: Any) -> bool:
    """Tell if an allocator that can free them holds the worker's weights and cache."""
    return worker.model_config.enable_sleep_mode


def discard(tag: str) -> int:
    """Give back every allocation of one tag, without a copy. Return how many bytes."""
    from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release

    torch.cuda.synchronize()
    freed = 0
    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        if data.tag == tag and not data.is_asleep:
            unmap_and_release(data.handle)
            data.is_asleep = True
            freed += data.handle[1]
    return freed


def restore(tag: str) -> int:
    """Undo :func:`discard`, and return how many bytes."""
    from vllm.device_allocator.cumem import CuMemAllocator, create_and_map

    taken = 0
    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        if data.tag == tag and data.is_asleep:
            create_and_map(data.handle)
            data.is_asleep = False
            taken += data.handle[1]
    return taken


def forget_scratch() -> None:
    """Let go of the sampler's buffers, a vocabulary for each of the GPU's
    multiprocessors.
    """
    from vllm.v1.sample.ops.topk_topp_triton import reset_buffer_cache

    reset_buffer_cache()


def rebuild_beside_cache(worker: Any) -> None:
    """Refill the block tables' addresses and sizes.

    Some releases keep them in the memory of the cache, which has just slept.
    """
    if hasattr(worker.model_runner, "post_kv_cache_wake_up"):
        worker.model_runner.post_kv_cache_wake_up()


def device_bytes_of(worker: Any) -> int:
    """Return the bytes that PyTorch holds on the device, without those that sleep."""
    if not torch.cuda.is_available():
        return 0

    asleep = 0
    if sleeps(worker):
        from vllm.device_allocator.cumem import CuMemAllocator

        allocated = CuMemAllocator.get_instance().pointer_to_data.values()
        asleep = sum(data.handle[1] for data in allocated if data.is_asleep)
    return max(torch.cuda.memory_reserved() - asleep, 0)
