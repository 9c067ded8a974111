"""The device, the process group and the mesh of one rank."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from coupler.engine_kit.rendezvous import store_of
from coupler.errors import ConfigError, CouplerError, TooFewDevices
from coupler.interfaces import Rank


def device_of(rank: Rank) -> torch.device:
    """The first of the rank's devices; without any, the visible GPUs are dealt out by rank, else the CPU.

    A deterministic rank makes PyTorch use deterministic kernels in this process from here on, or fail by name.
    """
    if rank.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
    count = torch.cuda.device_count()
    if not count:
        return torch.device("cpu")
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    index = next((i for i, uuid in enumerate(uuids) if rank.devices and uuid in rank.devices[0]), rank.index % count)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device; what it still computes is not waited for, which pageable memory would."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def build_mesh(rank: Rank, device: torch.device, fsdp_size: int) -> DeviceMesh:
    """Join the group and lay its ranks out: ``[shard]``, or ``[replica, shard]`` where ``fsdp_size`` is smaller.

    A group that this process is in already is used, so that several engines share one process.

    Raises:
        CouplerError: that group has other ranks.
        ConfigError: ``fsdp_size`` does not divide the ranks.
        TooFewDevices: two ranks share a GPU.
    """
    size = min(fsdp_size or rank.world, rank.world)
    if rank.world % size:
        raise ConfigError(f"engine.fsdp_size={size} does not divide the {rank.world} ranks of the engine.")
    if not dist.is_initialized():
        _init_process_group(rank)
        _refuse_shared(rank, device)
    if dist.get_world_size() != rank.world and rank.world == 1:
        # an engine of one rank inside a larger group, such as a reference model
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))
    if (dist.get_world_size(), dist.get_rank()) != (rank.world, rank.index):
        raise CouplerError(
            f"engine rank {rank.index} of {rank.world} runs in a process that is already rank {dist.get_rank()} of "
            f"{dist.get_world_size()}.\n  start it in a process of its own"
        )
    if size == rank.world:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (rank.world // size, size), mesh_dim_names=("replica", "shard"))


def _init_process_group(rank: Rank) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"  # gloo: shards offloaded to the host
    store = store_of(rank) if rank.world > 1 else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.world)


def _refuse_shared(rank: Rank, device: torch.device) -> None:
    """NCCL wants a GPU of its own for each rank of a host, and says so late and unclearly."""
    if device.type == "cpu" or rank.world == 1 or "NCCL_HOSTID" in os.environ:
        return
    mine = torch.tensor(list(str(torch.cuda.get_device_properties(device).uuid).encode()))
    uuids = [torch.empty_like(mine) for _ in range(rank.world)]
    dist.all_gather(uuids, mine)
    found = len({tuple(uuid.tolist()) for uuid in uuids})
    if found < rank.world:
        raise TooFewDevices(
            f"an engine of {rank.world} ranks needs {rank.world} GPUs, one for each; it has {found}.\n"
            f"  try:  fewer ranks, or more GPUs in CUDA_VISIBLE_DEVICES"
        )
