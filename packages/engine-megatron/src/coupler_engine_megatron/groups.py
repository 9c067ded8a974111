"""Megatron's process groups, with the type that they have once they are set up."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from torch.distributed import ProcessGroup


def tensor() -> ProcessGroup:
    """Ranks that split each matrix."""
    return _known(parallel_state.get_tensor_model_parallel_group())


def pipeline() -> ProcessGroup:
    """Ranks that split the layers."""
    return _known(parallel_state.get_pipeline_model_parallel_group())


def context() -> ProcessGroup:
    """Ranks that split each sequence."""
    return _known(parallel_state.get_context_parallel_group())


def tensor_and_context() -> ProcessGroup:
    """Ranks that share the tokens of a data shard, on one pipeline stage."""
    return _known(parallel_state.get_tensor_and_context_parallel_group())


def data() -> ProcessGroup:
    """Ranks that have the same part of the model, each its own part of the data."""
    return _known(parallel_state.get_data_parallel_group(with_context_parallel=True))


def expert() -> ProcessGroup:
    """Ranks that have different experts of the same layers."""
    return _known(parallel_state.get_expert_model_parallel_group())


def expert_tensor() -> ProcessGroup:
    """Ranks that split each matrix of an expert."""
    return _known(parallel_state.get_expert_tensor_parallel_group())


def expert_data() -> ProcessGroup:
    """Ranks that have the same experts."""
    return _known(parallel_state.get_expert_data_parallel_group())


def _known(group: Any) -> ProcessGroup:
    assert isinstance(group, ProcessGroup)
    return group
