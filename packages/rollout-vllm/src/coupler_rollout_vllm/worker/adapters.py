"""Load received adapters into a model worker, and count every tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coupler.engine_kit.inference.loading import (
    COPY,
    Piece,
    Plan,
    Way,
    account,
    copy,
    region,
    unfit,
)
from coupler.engine_kit.lora_names import A, partner
from coupler.errors import WeightSyncError
from coupler.interfaces import Named
from coupler_rollout_vllm.compat import worker as vllm

# The tensors of each model's adapter, and where each was copied.
loaded: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()
plans: WeakKeyDictionary[torch.nn.Module, Plan] = WeakKeyDictionary()


def load_adapter(worker: Any, weights: Iterable[Named]) -> dict[str, Any]:
    """Put the adapter of these tensors in place of the one before.

    vLLM loads the first adapter, and its copies are the plan for all that follow. A
    name is missing if it is the other half of an A or B that came, or if the adapter
    before had it. A name is unused if no layer took it.

    Returns:
        What became of the tensors, as ``receipts.join`` of core reads it.

    Raises:
        WeightSyncError: its rank is above what vLLM was started for, or a tensor does
            not fit its layer.
    """
    if plan := plans.get(vllm.model_of(worker)):
        return copy(plan, weights)
    return record(worker, weights)


def record(worker: Any, weights: Iterable[Named]) -> dict[str, Any]:
    """Let vLLM load the adapter. Keep its copies as the plan if it did nothing else."""
    received: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        num_bytes += int(tensor.nbytes)
        received[name] = vllm.on_device(worker, tensor)

    whole = {name: tensor for name, tensor in received.items() if partner(name) in received}
    model, places = vllm.model_of(worker), vllm.adapter_places(worker)
    ours = {name: vllm.in_model(worker, name) for name in received}
    rank = _rank(whole, vllm.adapter_room(worker))

    with Writes(places, whole) as writes:
        try:
            vllm.put_adapter(worker, {ours[name]: tensor for name, tensor in whole.items()}, rank)
        except RuntimeError as error:
            raise unfit(f"an adapter with {next(iter(whole))}", str(error)) from error

    for name in whole:
        if ours[name] in places and ours[name] not in writes.filled:
            raise unfit(name, f"its shape is {list(whole[name].shape)}")

    unused = [name for name in received if ours[name] not in writes.filled]
    alone = {partner(name) for name in received} - received.keys()
    missing = alone | (loaded.get(model, frozenset()) - received.keys())

    if not (missing or unused):
        loaded[model] = frozenset(received)
        if writes.plan.keys() == received.keys():
            plans[model] = writes.plan
    return account(received, num_bytes, unused, sorted(missing))


def forget_adapter(worker: Any) -> None:
    """Drop the adapter, since the weights beneath it change."""
    if vllm.adapter_room(worker):
        vllm.drop_adapters(worker)
        for known in (loaded, plans):
            known.pop(vllm.model_of(worker), None)


def _rank(tensors: dict[str, torch.Tensor], room: int) -> int:
    """Return the one rank of all these tensors.

    Raises:
        WeightSyncError: they have several, or one above ``room``.
    """
    ranks = {tensor.shape[0 if name.endswith(A) else 1] for name, tensor in tensors.items()}
    if len(ranks) > 1 or max(ranks, default=0) > room:
        raise WeightSyncError(
            f"an adapter of rank {', '.join(map(str, sorted(ranks)))} came; the rollout has "
            f"room for one rank, of {room} at most.\n  set:  rollout.max_lora_rank"
        )
    return max(ranks, default=0)


class Writes(TorchDispatchMode):
    """Watch which tensors of an adapter are copied to their place, and from where.

    vLLM fuses layers, cuts tensors for its workers and pads ranks, and leaves out what
    has no layer. All of it ends in a copy into a layer's place for one tensor. Only the
    rank may be smaller than the place, so a copy counts if it spans the whole width.
    """

    def __init__(self, places: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.places = {
            place.untyped_storage()._cdata: (name, place) for name, place in places.items()
        }
        self.sent = {
            tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in sent.items()
        }
        self.filled: set[str] = set()
        self.plan: Plan = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is COPY and (found := self.places.get(args[0].untyped_storage()._cdata)):
            name, place = found
            axis = -1 if name.endswith(A) else -2
            if args[0].ndim == 2 and args[0].shape[axis] == place.shape[axis]:
                self.filled.add(name)
                self._copied(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _copied(self, into: torch.Tensor, source: torch.Tensor) -> None:
        if found := self.sent.get(source.untyped_storage()._cdata):
            name, tensor = found
            self.plan.setdefault(name, Way(tuple(tensor.shape))).pieces.append(
                Piece(into, region(source))
            )
