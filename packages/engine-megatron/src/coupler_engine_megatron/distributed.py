"""Set up Megatron's parallel groups of one rank, and exchange values between ranks."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from coupler.errors import CouplerError
from coupler.interfaces import Layout, Rank
from coupler_engine_megatron.config import MegatronConfig


def exchange(value: Any) -> list[Any]:
    """Give every rank the value of each one, as JSON over gloo."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))

    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)

    return [
        json.loads(bytes(text[: int(size)].tolist()))
        for text, size in zip(found, sizes, strict=True)
    ]


def split_world(config: MegatronConfig, rank: Rank) -> Layout:
    """Set up Megatron's parallel groups, and return how ranks consume data.

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
            "two engines of one process need the same parallel sizes: Megatron-Core has one "
            "set of groups per process.\n"
            "  try:  equal engine.*_parallel for both, or executor=ray, which starts every "
            "role on its own"
        )

    model_parallel_cuda_manual_seed(rank.seed % 2**31)
    return _layout()


def destroy_groups() -> None:
    """Forget Megatron's parallel groups, which are parts of the process group.

    They go when it does.
    """
    parallel_state.destroy_model_parallel()


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
    """Make each data-parallel rank a data shard.

    The first of its ranks that has the model's last layer answers.
    """
    answers = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage()
    )
    found = exchange([parallel_state.get_data_parallel_rank(), answers])
    return Layout(tuple(shard for shard, _ in found), tuple(answer for _, answer in found))
