"""Load received tensors into the model of a vLLM worker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from coupler.engine_kit.inference.loading import Ledger, copy, plans, record
from coupler.interfaces import Named
from coupler_rollout_vllm.compat import worker as vllm


def load(worker: Any, weights: Iterable[Named]) -> dict[str, Any]:
    """Load ``weights`` into the model.

    Layers whose kernels want their weights packed are filled through vLLM's reload,
    which packs them anew. If all parameters are as they were loaded, tensors are copied
    straight into them. The first time this is done by the model's loader, whose copies
    are the plan for all later times.

    Returns:
        What became of the tensors, as ``receipts.join`` of core reads it.

    Raises:
        WeightSyncError: a tensor does not fit its parameter.
    """
    folder = Path(vllm.folder_of(worker))
    if vllm.packs(worker):
        with vllm.reloading(worker) as model:
            return reload(model, vllm.unfilled(model), weights, folder)
    with vllm.configured(worker) as model, torch.no_grad():
        return copy(plans[model], weights) if model in plans else record(model, weights, folder)


def reload(
    model: Any, unfilled: frozenset[str], weights: Iterable[Named], folder: Path
) -> dict[str, Any]:
    """Load through vLLM's reload.

    The layers keep the tensors that they get until they have all.
    """
    ledger = Ledger(model, unfilled)
    with ledger:
        ledger.feed(model, ((name, vllm.kept(tensor)) for name, tensor in weights))
    return ledger.answer(folder)
