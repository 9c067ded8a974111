"""Trace some ranks of a torch engine in some optimizer steps, with torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Profile:
    """The ranks and steps to trace, and the folder to write to.

    Attributes:
        steps: numbers of optimizer steps, from 0.
    """

    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    folder: str = ""

    @contextmanager
    def of(self, role: str, rank: int, step: int) -> Iterator[None]:
        """Trace the block inside, if this rank and step are wanted.

        Writes ``ROLE-rankR-stepS.trace.json``, which Perfetto and chrome://tracing
        read, and on a GPU ``ROLE-rankR-stepS.memory.pickle``, every allocation of the
        step for docs.pytorch.org/memory_viz.
        """
        if rank not in self.ranks or step not in self.steps:
            yield
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        stem = str(folder / f"{role}-rank{rank}-step{step}")
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.memory._record_memory_history()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        try:
            with profile(activities=activities, profile_memory=True, record_shapes=True) as trace:
                yield
            trace.export_chrome_trace(f"{stem}.trace.json")
        finally:
            # The snapshot explains a step that ran out of memory too.
            if on_gpu:
                torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)


NOTHING = Profile()
