"""Measure the memory that work takes, to compare it with what a plan said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that ``work`` held above those that were held before.

    On a GPU that is what PyTorch's allocator counts. On the CPU it is read from the
    profiler, which sees every allocation of PyTorch's.
    """
    import torch

    if torch.cuda.is_available():
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


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes behind tensors, with each storage counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
