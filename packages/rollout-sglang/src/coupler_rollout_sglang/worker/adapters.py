"""Put received adapters in their place in a model worker, and count every tensor.

SGLang keeps A and B of a layer as its kernels read them: fused with those of other
layers, cut for this worker and padded to the largest rank. They go where the weights
beneath them went.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from coupler.engine_kit.inference.loading import Plan, Way, account, as_tensor, unfit
from coupler.engine_kit.lora_names import names_of, partner
from coupler.errors import WeightSyncError
from coupler.interfaces import Named
from coupler_rollout_sglang.compat import worker as sglang
from coupler_rollout_sglang.worker import state

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A layer's weight, and the places of its A and B."""


@dataclass(frozen=True, slots=True)
class Place:
    """Hold where A and B of one weight go, and which parts of them."""

    shape: tuple[int, ...]
    """Shape of the whole weight, [out, in]."""
    a: torch.Tensor
    """[most ranks, in of this worker]"""
    b: torch.Tensor
    """[out of this worker, most ranks]"""
    columns: slice
    rows: slice

    def check(
        self,
        names: tuple[str, str],
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> None:
        """Refuse an adapter that is none of this weight.

        Raises:
            WeightSyncError: its rank is above what there is room for, or A or B has
                another shape.
        """
        rank, room = len(a), len(self.a)
        if rank > room:
            raise WeightSyncError(
                f"an adapter of rank {rank} came; the rollout has room for {room}.\n"
                f"  set:  rollout.max_lora_rank={rank}"
            )

        out, into = self.shape
        for name, tensor, shape in (
            (names[0], a, (rank, into)),
            (names[1], b, (out, rank)),
        ):
            if tensor.shape != shape:
                raise unfit(
                    name,
                    f"its shape is {list(tensor.shape)}, not {list(shape)}",
                )

    def fill(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copy this worker's part. The ranks above those of A and B become 0."""
        self.a.zero_()[: len(a)].copy_(a[:, self.columns])
        self.b.zero_()[:, : len(a)].copy_(b[self.rows])


def load_adapter(plan: Plan, weights: Iterable[Named]) -> dict[str, Any]:
    """Put the adapter of these tensors in place of the one before.

    All tensors are checked before the first is copied, so that a refused adapter leaves
    the one before. A name is missing if it is the other half of an A or B that came, or
    if the adapter before had it. A name is unused if no layer takes it.

    Args:
        plan: how the weights beneath it were copied.

    Raises:
        WeightSyncError: a tensor does not fit its layer, or the rank is too high.
    """
    received: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        num_bytes += int(tensor.nbytes)
        # A copy, since the sender's memory is its own again.
        received[name] = as_tensor(tensor).clone()

    pairs = [
        (names, place)
        for weight, place in places(plan, _layers()).items()
        if received.keys() >= set(names := names_of(weight))
    ]
    for names, place in pairs:
        place.check(names, *(received[name] for name in names))
    for names, place in pairs:
        place.fill(*(received[name] for name in names))

    used = {name for names, _ in pairs for name in names}
    unused = [name for name in received if name not in used]
    missing = ({partner(name) for name in received} | state.adapter) - received.keys()
    if not (missing or unused):
        state.adapter = frozenset(received)
    return account(received, num_bytes, unused, sorted(missing))


def forget_adapter() -> None:
    """Fill the adapter's place with 0, since the weights beneath it change."""
    for _, a, b in _layers():
        a.zero_()
        b.zero_()
    state.adapter = frozenset()


def _layers() -> Iterator[Layer]:
    return sglang.adapted_layers(state.manager) if state.manager else iter(())


def places(plan: Plan, layers: Iterable[Layer]) -> dict[str, Place]:
    """Return the place of each weight's A and B, by its name in the checkpoint.

    A layer that SGLang fuses from other parts than the checkpoint has none.
    """
    fused: defaultdict[int, list[tuple[str, Way]]] = defaultdict(list)
    for name, way in plan.items():
        if len(way.shape) == 2 and len(way.pieces) == 1:
            fused[way.pieces[0].into.untyped_storage()._cdata].append((name, way))

    found: dict[str, Place] = {}
    for weight, a, b in layers:
        parts = fused[weight.untyped_storage()._cdata]
        parts.sort(key=lambda part: part[1].pieces[0].into.storage_offset())
        room = b.shape[1]
        if len(a) == room * len(parts):
            for (name, way), of_a in zip(
                parts,
                a.split(room),
                strict=True,
            ):
                found[name] = _place(way, weight, of_a, b)
    return found


def _place(
    way: Way,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> Place:
    """Return the place of A and B from how their weight is copied into a layer's."""
    (piece,) = way.pieces
    start, (height, width), _ = piece.source
    row, column = divmod(start, way.shape[1])
    into = int(piece.into.storage_offset() - weight.storage_offset()) // weight.stride(0)
    return Place(
        shape=way.shape,
        a=a,
        b=b[into : into + height],
        columns=slice(column, column + width),
        rows=slice(row, row + height),
    )
