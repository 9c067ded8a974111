"""The device, the process group and Megatron's parallel groups of one rank."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from coupler.engine_kit.rendezvous import store_of
from coupler.errors import CouplerError, TooFewDevices
from coupler.interfaces import Layout, Rank
from coupler_engine_megatron.config import MegatronConfig


def device_of(rank: Rank) -> torch.device:
    """The first of the rank's devices; without any, the visible GPUs are dealt out by rank, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    index = next((i for i, uuid in enumerate(uuids) if rank.devices and uuid in rank.devices[0]), rank.index % count)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join(rank: Rank, device: torch.device) -> None:
    """Join the process group; one that this process is in already is used, so that engines can share a process.

    Raises:
        CouplerError: that group has other ranks.
        TooFewDevices: two ranks share a GPU.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = store_of(rank) if rank.world > 1 else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.world)
        _refuse_shared(rank, device)
    if (dist.get_world_size(), dist.get_rank()) != (rank.world, rank.index):
        raise CouplerError(
            f"engine rank {rank.index} of {rank.world} runs in a process that is already rank {dist.get_rank()} of "
            f"{dist.get_world_size()}.\n  start it in a process of its own"
        )


def _refuse_shared(rank: Rank, device: torch.device) -> None:
    """NCCL wants a GPU of its own for each rank of a host, and says so late and unclearly."""
    if device.type == "cpu" or rank.world == 1 or "NCCL_HOSTID" in os.environ:
        return
    found = len(set(exchange(str(torch.cuda.get_device_properties(device).uuid))))
    if found < rank.world:
        raise TooFewDevices(
            f"an engine of {rank.world} ranks needs {rank.world} GPUs, one for each; it has {found}.\n"
            "  try:  fewer ranks, or more GPUs in CUDA_VISIBLE_DEVICES"
        )


def exchange(value: Any) -> list[Any]:
    """Give every rank the value of each one; plain JSON, over gloo or the host's copy of it."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(found, sizes, strict=True)]


def split_world(config: MegatronConfig, rank: Rank) -> Layout:
    """Set up Megatron's parallel groups, and say how ranks consume data.

    Raises:
        CouplerError: another engine of this process has them of other sizes.
    """
    wanted = (
        config.tensor_parallel,
        config.pipeline_parallel,
        config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        config.context_parallel,
        config.expert_parallel,
        config.expert_tensor_parallel,
    )
    if not parallel_state.model_parallel_is_initialized():
        tensor, pipeline, virtual, context, expert, expert_tensor = wanted
        parallel_state.initialize_model_parallel(
            tensor,
            pipeline,
            virtual,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
            create_gloo_process_groups=False,
        )
    elif _sizes() != wanted:
        raise CouplerError(
            "two engines of one process need the same parallel sizes: Megatron-Core has one set of groups per process."
            "\n  try:  equal engine.*_parallel for both, or executor=ray, which starts every role on its own"
        )
    model_parallel_cuda_manual_seed(rank.seed % 2**31)
    return _layout()


def _sizes() -> tuple[int | None, ...]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )


def _layout() -> Layout:
    """A data shard is a data-parallel rank; of its ranks the first that has the model's last layer answers."""
    answers = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage()
    )
    found = exchange([parallel_state.get_data_parallel_rank(), answers])
    return Layout(tuple(shard for shard, _ in found), tuple(answer for _, answer in found))
