"""Read safetensors into shards by checkpoint names, and stream shards out whole."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from coupler.engine_kit.json_files import read_json
from coupler.errors import CouplerError
from coupler.interfaces import Named

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one expert's matrix in transformers' tensor of all experts of a
    layer.

    Gates stand above ups.
    """

    expert: int
    half: int | None
    """The half of the expert's rows, or None for all of them."""

    def of(self, experts: Tensor) -> Tensor:
        """Return the view of it in [E, rows, columns]."""
        rows = experts[self.expert]
        return rows if self.half is None else rows.chunk(2)[self.half]

    def held(self, experts: Tensor) -> Tensor | None:
        """Return the view of it in this rank's shard, or None if it is not there."""
        if not isinstance(experts, DTensor):
            return self.of(experts)
        mine = rows_of(experts)
        return (
            replace(self, expert=self.expert - mine.start).of(experts.to_local())
            if self.expert in mine
            else None
        )


Experts = dict[str, dict[str, Place]]
"""Places by the checkpoint's names, by the model's name of their tensor."""


def files_of(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor name of a checkpoint, in the order of its index.

    Raises:
        CouplerError: the folder holds no safetensors, or its index is damaged.
    """
    if (folder / _INDEX).is_file():
        try:
            files = read_json(folder / _INDEX)["weight_map"]
            return {name: folder / file for name, file in files.items()}
        except (LookupError, TypeError, AttributeError) as error:
            raise CouplerError(
                f"{folder / _INDEX} is damaged: {error!r}.\n  try:  saving the model again"
            ) from None

    if (folder / _SINGLE).is_file():
        with _open(folder / _SINGLE) as file:
            return dict.fromkeys(file.keys(), folder / _SINGLE)
    raise CouplerError(
        f"model.path={folder} holds neither {_INDEX} nor {_SINGLE}.\n"
        "  try:  save the model with save_pretrained; other formats are not read"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, FileNotFoundError) as error:
        raise CouplerError(
            f"model.path: {path} is no whole safetensors file: {error}.\n  try:  copy it again"
        ) from None


def match(
    model: PreTrainedModel, names: Collection[str], apart: Collection[str] = ()
) -> tuple[dict[str, Tensor], Experts]:
    """Map checkpoint names to the model's parameters and buffers, tied ones once.

    Tensors in ``apart`` have no such name. A tensor that holds the experts of a layer
    is mapped under the model's name, and its places are returned with it.

    Raises:
        CouplerError: a name has no tensor, or a tensor has no name.
    """
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in apart
    }
    # {name: the name that it shares its tensor with}
    tied: dict[str, str] = model.all_tied_weights_keys
    ignored = [r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ())]

    matched: dict[str, Tensor] = {}
    experts: dict[str, dict[str, Place]] = defaultdict(dict)
    unexpected = []
    for name in names:
        key = name if name in state else f"{model.base_model_prefix}.{name}"
        if key in state:
            if tied.get(key) not in names:
                matched[name] = state[key]
        elif place := _place(state, name):
            stacked, experts[place[0]][name] = place
            matched[stacked] = state[stacked]
        elif not any(re.search(pattern, name) for pattern in ignored):
            unexpected.append(name)

    reached = {id(tensor) for tensor in matched.values()}
    missing = [name for name, tensor in state.items() if id(tensor) not in reached]
    missing += [
        name
        for name, places in experts.items()
        if len(places) < _matrices(places) * len(state[name])
    ]

    if missing or unexpected:
        raise CouplerError(
            "the checkpoint of model.path does not fit a model of type "
            f"{model.config.model_type!r}.\n"
            f"  missing:     {_listed(missing)}\n  unexpected:  {_listed(unexpected)}\n"
            "  engine=fsdp reads checkpoints whose names are the model's, or "
            "experts.N.gate_proj, up_proj and down_proj"
        )
    return matched, experts


def _place(state: Mapping[str, Tensor], name: str) -> tuple[str, Place] | None:
    """Return the model's tensor that holds a matrix of one expert, and its place there.

    It is None for any other name.
    """
    if not (found := _EXPERT.fullmatch(name)):
        return None
    prefix, expert, which = found[1], int(found[2]), found[3]
    key = f"{prefix}.down_proj" if which == "down" else f"{prefix}.gate_up_proj"
    if key not in state or expert >= len(state[key]):
        return None
    return key, Place(expert, None if which == "down" else int(which == "up"))


def _matrices(places: Mapping[str, Place]) -> int:
    """Return how many matrices each expert has in the tensor of these places."""
    return 1 if next(iter(places.values())).half is None else 2


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + rest or "none"


@torch.no_grad()
def read(files: Mapping[str, Path], matched: Mapping[str, Tensor], experts: Experts) -> None:
    """Fill every matched tensor that a file has.

    Only the rows of this rank's shard are read.

    Raises:
        CouplerError: a tensor has another shape in the checkpoint.
    """
    wanted: dict[str, tuple[Tensor, Place | None]] = {
        name: (tensor, None) for name, tensor in matched.items() if name in files
    }
    wanted |= {
        name: (matched[key], place)
        for key, places in experts.items()
        for name, place in places.items()
    }

    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in wanted:
        by_file[files[name]].append(name)

    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                stored, (target, place) = file.get_slice(name), wanted[name]
                whole = place.of(torch.empty(target.shape, device="meta")) if place else target
                if tuple(stored.get_shape()) != tuple(whole.shape):
                    raise CouplerError(
                        f"{name} has shape {stored.get_shape()} in {path} and "
                        f"{list(whole.shape)} in the model that its config.json describes."
                    )
                if place:
                    if (held := place.held(target)) is not None:
                        held.copy_(file.get_tensor(name))
                elif not isinstance(target, DTensor):
                    target.copy_(file.get_tensor(name))
                elif len(rows := rows_of(target)):
                    target.to_local().copy_(stored[rows.start : rows.stop])


def rows_of(tensor: DTensor) -> range:
    """Return the rows of the whole tensor that this rank holds."""
    axis = len(tensor.placements) - 1
    return shard_rows(
        tensor.shape[0], tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
    )


def shard_rows(total: int, shards: int, shard: int) -> range:
    """Return the rows of one shard.

    FSDP2 cuts the first dimension as ``torch.chunk`` does: the last shards may be
    empty.
    """
    size = -(-total // shards)
    return range(min(shard * size, total), min((shard + 1) * size, total))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, without its gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor whose rows are cut as those of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return local

    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the full tensor on every rank. This is a collective call.

    Floats are cast before they travel.
    """
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)

    if not isinstance(tensor, DTensor):
        return tensor

    # An HSDP gradient and parameter are equal on all replicas, so only shards are
    # gathered.
    return tensor.redistribute(placements=[Replicate()] * len(tensor.placements)).to_local()


def is_exact(name: str) -> bool:
    """Tell if a tensor is never rounded: the bias by which a router chooses experts.

    It decides between experts that are close.
    """
    return name.endswith(("correction_bias", "expert_bias"))


def stream(matched: Iterable[Named], experts: Experts, dtype: torch.dtype) -> Iterator[Named]:
    """Yield every tensor of the checkpoint whole, in ``dtype`` if it may be rounded."""
    for name, tensor in matched:
        # The name lets go of what it was cast from.
        tensor = whole(tensor, None if is_exact(name) else dtype)
        yield from _as_stored(name, tensor, experts)


def stream_gradients(matched: Mapping[str, Tensor], experts: Experts) -> Iterator[Named]:
    """Yield the whole fp32 gradient of every trained tensor of the checkpoint."""
    for name, tensor in matched.items():
        if tensor.requires_grad:
            if tensor.grad is None:
                grad = torch.zeros(tensor.shape, device=tensor.device)
            else:
                grad = whole(tensor.grad)
            yield from _as_stored(name, grad, experts)


def _as_stored(name: str, tensor: Tensor, experts: Experts) -> Iterator[Named]:
    """Yield a tensor of the model as a checkpoint has it: whole, or its experts one by
    one.
    """
    if name not in experts:
        yield name, tensor
        return
    for part, place in experts[name].items():
        yield part, place.of(tensor)
