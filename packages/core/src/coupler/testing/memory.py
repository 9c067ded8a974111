"""Measure the memory that work takes, to compare it with what a plan said."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from coupler.batch import Batch

TOKENS, LENGTH = 1024, 256  # of the batch that is measured, and of its sequences
SMALL: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 320,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
LARGE: dict[str, dict[str, Any]] = {
    "1.5b": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "7b": {
        "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584,
        "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "moe": {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Models whose peaks were measured on GPUs, as in ``config.json``."""


def measured_batch(
    tokens: int = TOKENS, length: int = LENGTH, vocab: int = SMALL["vocab_size"]
) -> Batch:
    """Return a batch whose tokens but the first of each sequence are trained."""
    lengths = np.full(tokens // length, length)
    mask = np.ones(tokens, bool)
    mask[np.cumsum(lengths) - lengths] = False

    drawn = np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32)
    weight = (mask / mask.sum()).astype(np.float32)
    return Batch(lengths, {"tokens": drawn, "loss_mask": mask, "loss_weight": weight})


def surprise(outputs: Any, _: Any) -> Any:
    """Return the negative log-prob of each token: a loss without columns."""
    return -outputs["logprobs"], {}


def on_gpu() -> bool:
    """Tell whether memory is measured on a GPU."""
    import torch

    return torch.cuda.is_available()


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that ``work`` held above those that were held before.

    On a GPU that is what PyTorch's allocator counts. On the CPU it is read from the
    profiler, which sees every allocation of PyTorch's.
    """
    import torch

    if on_gpu():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    events: Any = found.profiler
    tree = events.kineto_results.experimental_event_tree()
    now = peak = 0
    for _, size in sorted(_allocations(tree), key=lambda pair: pair[0]):
        now += size
        peak = max(peak, now)
    return peak


def _allocations(events: Iterable[Any]) -> Iterable[tuple[int, int]]:
    """Yield the time and the bytes of each allocation, which a release has below 0."""
    from torch._C._profiler import _EventType  # pyright: ignore[reportMissingImports]

    for event in events:
        if event.typed[0] == _EventType.Allocation:
            yield event.start_time_ns, event.typed[1].alloc_size
        yield from _allocations(event.children)


def held_bytes() -> int:
    """Return the bytes of the tensors that this process holds.

    On a GPU that is what PyTorch's allocator counts there. On the CPU they are those of
    all tensors in Python, and of their gradients.
    """
    import torch

    if on_gpu():
        return torch.cuda.memory_allocated()

    from torch._subclasses import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    found += [each.grad for each in found if each.is_leaf and each.grad is not None]
    # Compiled code keeps tensors without numbers. Those of a DTensor are in the part of
    # this rank, which is found, too.
    empty = [isinstance(each, FakeTensor) or is_traceable_wrapper_subclass(each) for each in found]
    return storage_bytes(
        each
        for each, nothing in zip(found, empty, strict=True)
        if each.device.type == "cpu" and not nothing
    )


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes behind tensors, with each storage counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
