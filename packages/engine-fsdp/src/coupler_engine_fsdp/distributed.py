"""Prepare the device and the mesh of one rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from coupler.engine_kit.process_group import device_of, require_same_ranks
from coupler.interfaces import Rank


def prepare_device(rank: Rank) -> torch.device:
    """Return the device of the rank.

    If the rank is deterministic, PyTorch uses deterministic kernels in this process
    from here on, or fails with the name of the kernel.
    """
    if rank.deterministic:
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return device_of(rank)


def build_mesh(rank: Rank, device: torch.device, fsdp_size: int) -> DeviceMesh:
    """Arrange the ranks of the joined group: ``[shard]``, or ``[replica, shard]``.

    There are replicas if ``fsdp_size`` is smaller than the world.

    Raises:
        CouplerError: the group has other ranks.
    """
    size = min(fsdp_size or rank.world, rank.world)
    if dist.get_world_size() != rank.world and rank.world == 1:
        # This is an engine of one rank inside a larger group, such as a reference
        # model.
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))

    require_same_ranks(rank)
    if size == rank.world:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type, (rank.world // size, size), mesh_dim_names=("replica", "shard")
    )
