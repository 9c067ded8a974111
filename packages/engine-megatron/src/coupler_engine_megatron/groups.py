"""Return Megatron's process groups, typed as they are once they are set up."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from torch.distributed import ProcessGroup


def tensor() -> ProcessGroup:
    """Return the ranks that split each matrix."""
    return _known(parallel_state.get_tensor_model_parallel_group())


def pipeline() -> ProcessGroup:
    """Return the ranks that split the layers."""
    return _known(parallel_state.get_pipeline_model_parallel_group())


def context() -> ProcessGroup:
    """Return the ranks that split each sequence."""
    return _known(parallel_state.get_context_parallel_group())


def tensor_and_context() -> ProcessGroup:
    """Return the ranks that share the tokens of a data shard, on one pipeline stage."""
    return _known(parallel_state.get_tensor_and_context_parallel_group())


def data() -> ProcessGroup:
    """Return the ranks that have the same part of the model, on different data."""
    return _known(parallel_state.get_data_parallel_group(with_context_parallel=True))


def expert() -> ProcessGroup:
    """Return the ranks that have different experts of the same layers."""
    return _known(parallel_state.get_expert_model_parallel_group())


def expert_tensor() -> ProcessGroup:
    """Return the ranks that split each matrix of an expert."""
    return _known(parallel_state.get_expert_tensor_parallel_group())


def expert_data() -> ProcessGroup:
    """Return the ranks that have the same experts."""
    return _known(parallel_state.get_expert_data_parallel_group())


def _known(group: Any) -> ProcessGroup:
    assert isinstance(group, ProcessGroup)
    return group
