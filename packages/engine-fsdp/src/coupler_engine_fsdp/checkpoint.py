"""Sharded checkpoints: ``torch.distributed.checkpoint`` files that any number of ranks can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from coupler.errors import CouplerError
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh


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
        CouplerError: the checkpoint lacks one of them, or does not exist.
    """
    try:
        dcp.load(state, checkpoint_id=path, process_group=_group(mesh))
    except (CheckpointException, RuntimeError, OSError) as error:
        raise CouplerError(f"the checkpoint {path} cannot be read into this engine: {error}") from error


def _group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The engine's ranks: the default group, unless the engine is one rank inside a larger one."""
    return None if mesh.size() == dist.get_world_size() else mesh.get_group()
