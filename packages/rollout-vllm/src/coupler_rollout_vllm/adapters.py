"""Load received adapters into vLLM's place for one, and account for every tensor of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coupler.adapters import A, partner
from coupler.errors import WeightSyncError
from coupler.interfaces import Named
from coupler_rollout_vllm import compat

COPY = torch.ops.aten.copy_.default

loaded: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()  # the model's adapter, by name


def load_adapter(worker: Any, weights: Iterable[Named]) -> dict[str, Any]:
    """Put the adapter of these tensors in place of the one before; return what became of it, see :func:`receipts.join`.

    Missing is the other half of an A or B, and what the adapter before it had; unused is what no layer took.

    Raises:
        WeightSyncError: its rank is above what vLLM was started for, or a tensor does not fit its layer.
    """
    received = {name: compat.on_host(tensor) for name, tensor in weights}
    whole = {name: tensor for name, tensor in received.items() if partner(name) in received}
    model, places = compat.model_of(worker), compat.adapter_places(worker)
    ours = {name: compat.in_model(worker, name) for name in received}
    rank = _rank(whole, compat.adapter_room(worker))
    with Writes(places) as writes:
        try:
            compat.put_adapter(worker, {ours[name]: tensor for name, tensor in whole.items()}, rank)
        except RuntimeError as error:
            raise _unfit(f"an adapter with {next(iter(whole))}", str(error)) from error
    for name in whole:
        if ours[name] in places and ours[name] not in writes.filled:
            raise _unfit(name, f"its shape is {list(whole[name].shape)}")
    unused = [name for name in received if ours[name] not in writes.filled]
    alone = {partner(name) for name in received} - received.keys()
    missing = alone | (loaded.get(model, frozenset()) - received.keys())
    if not (missing or unused):
        loaded[model] = frozenset(received)
    size = sum(int(tensor.nbytes) for tensor in received.values())
    return {"num_received": len(received), "num_bytes": size, "unused": unused, "missing": sorted(missing)}


def forget_adapter(worker: Any) -> None:
    """The weights beneath it change: from now on they stand alone."""
    if compat.adapter_room(worker):
        compat.drop_adapters(worker)
        loaded.pop(compat.model_of(worker), None)


def _rank(tensors: dict[str, torch.Tensor], room: int) -> int:
    """The rank that all of them have.

    Raises:
        WeightSyncError: they have several, or one above ``room``.
    """
    ranks = {tensor.shape[0 if name.endswith(A) else 1] for name, tensor in tensors.items()}
    if len(ranks) > 1 or max(ranks, default=0) > room:
        raise WeightSyncError(
            f"an adapter of rank {', '.join(map(str, sorted(ranks)))} came; the rollout has room for one rank, "
            f"of {room} at most.\n  set:  rollout.max_lora_rank"
        )
    return max(ranks, default=0)


def _unfit(what: str, why: str) -> WeightSyncError:
    return WeightSyncError(
        f"{what} does not fit the rollout's model: {why}.\n"
        "  look at:  model.path, and whether engine and rollout have the same architecture"
    )


class Writes(TorchDispatchMode):
    """Sees which tensors of an adapter are copied to their place, over its whole width.

    vLLM fuses layers, cuts tensors for its workers and pads ranks, and leaves out what has no layer. All of it ends in
    a copy into a layer's place for one tensor, of which the rank may be smaller than the place and nothing else.
    """

    def __init__(self, places: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.places = {place.untyped_storage()._cdata: (name, place) for name, place in places.items()}
        self.filled: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is COPY and (found := self.places.get(args[0].untyped_storage()._cdata)):
            name, place = found
            axis = -1 if name.endswith(A) else -2
            if args[0].ndim == 2 and args[0].shape[axis] == place.shape[axis]:
                self.filled.add(name)
        return func(*args, **(kwargs or {}))
