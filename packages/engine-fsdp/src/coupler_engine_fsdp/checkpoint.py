"""Sharded checkpoints: ``torch.distributed.checkpoint`` files that any number of ranks can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh

from coupler.errors import CouplerError


@dataclass(frozen=True, slots=True)
class Done:
    """A save that has finished."""

    def wait(self, seconds: float) -> None:
        """Return at once."""


def save(path: Path, state: dict[str, Tensor], mesh: DeviceMesh) -> Done:
    """Write ``state``; collective."""
    dcp.save(state, checkpoint_id=path, process_group=_group(mesh))
    return Done()


def load(path: Path, state: dict[str, Tensor], mesh: DeviceMesh) -> None:
    """Fill the tensors of ``state`` in place; collective.

    Raises:
        CouplerError: the checkpoint does not exist, or lacks a tensor, or has it in another shape.
    """
    try:
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except OSError as error:
        raise CouplerError(f"{path} holds no checkpoint of engine=fsdp: {error}") from error
    shapes = {name: entry.size for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    odd = [name for name, tensor in state.items() if shapes.get(name) != tensor.shape]
    if odd:
        raise CouplerError(
            f"the checkpoint {path} does not fit this engine: {len(odd)} tensors are absent or of another shape, "
            f"the first is {odd[0]}.\n  try:  the model.path and the parts that it was saved with"
        )
    dcp.load(state, checkpoint_id=path, process_group=_group(mesh))


def _group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The engine's ranks: the default group, unless the engine is one rank inside a larger one."""
    return None if mesh.size() == dist.get_world_size() else mesh.get_group()
