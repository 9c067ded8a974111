"""Checkpoint names and tensors: read safetensors into shards, and stream shards out whole."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from coupler.errors import CouplerError
from coupler.interfaces import Named

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def files_of(folder: Path) -> dict[str, Path]:
    """The file of every tensor name of a checkpoint, in the order of its index.

    Raises:
        CouplerError: the folder holds no safetensors.
    """
    if (folder / _INDEX).is_file():
        return {name: folder / file for name, file in json.loads((folder / _INDEX).read_text())["weight_map"].items()}
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


def match(model: PreTrainedModel, names: Collection[str], apart: Collection[str] = ()) -> dict[str, Tensor]:
    """Map checkpoint names to the model's parameters and buffers, tied ones once; those in ``apart`` have no such name.

    Raises:
        CouplerError: a name has no tensor, or a tensor has no name.
    """
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in apart}
    tied: dict[str, str] = model.all_tied_weights_keys  # {name: the name it shares its tensor with}
    ignored = [r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ())]
    matched: dict[str, Tensor] = {}
    unexpected = []
    for name in names:
        key = name if name in state else f"{model.base_model_prefix}.{name}"
        if key in state:
            if tied.get(key) not in names:
                matched[name] = state[key]
        elif not any(re.search(pattern, name) for pattern in ignored):
            unexpected.append(name)
    reached = {id(tensor) for tensor in matched.values()}
    missing = [name for name, tensor in state.items() if id(tensor) not in reached]
    if missing or unexpected:
        raise CouplerError(
            f"the checkpoint of model.path does not fit a model of type {model.config.model_type!r}.\n"
            f"  missing:     {_listed(missing)}\n  unexpected:  {_listed(unexpected)}\n"
            "  engine=fsdp reads checkpoints whose names are the model's; transformers fuses some (experts) on loading"
        )
    return matched


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


@torch.no_grad()
def read(files: Mapping[str, Path], matched: Mapping[str, Tensor]) -> None:
    """Fill every matched tensor from its file, reading only the rows of this rank's shard.

    Raises:
        CouplerError: a tensor has another shape in the checkpoint.
    """
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in matched:
        by_file[files[name]].append(name)
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                stored, target = file.get_slice(name), matched[name]
                if tuple(stored.get_shape()) != tuple(target.shape):
                    raise CouplerError(
                        f"{name} has shape {stored.get_shape()} in {path} and {list(target.shape)} in the model "
                        "that its config.json describes."
                    )
                if not isinstance(target, DTensor):
                    target.copy_(file.get_tensor(name))
                elif len(rows := rows_of(target)):
                    target.to_local().copy_(stored[rows.start : rows.stop])


def rows_of(tensor: DTensor) -> range:
    """Rows of the whole tensor that this rank holds."""
    axis = len(tensor.placements) - 1
    return shard_rows(tensor.shape[0], tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis))


def shard_rows(total: int, shards: int, shard: int) -> range:
    """Rows of one shard. FSDP2 cuts the first dimension as ``torch.chunk`` does: the last shards may be empty."""
    size = -(-total // shards)
    return range(min(shard * size, total), min((shard + 1) * size, total))


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The full tensor on every rank; collective. Its floats are cast before they travel."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    if not isinstance(tensor, DTensor):
        return tensor
    # an HSDP gradient and parameter are equal on all replicas, so only shards are gathered
    return tensor.redistribute(placements=[Replicate()] * len(tensor.placements)).to_local()


def stream(matched: Iterable[Named], dtype: torch.dtype) -> Iterator[Named]:
    """Yield every tensor whole, in ``dtype``."""
    for name, tensor in matched:
        yield name, whole(tensor, dtype)


def stream_gradients(matched: Mapping[str, Tensor]) -> Iterator[Named]:
    """Yield the whole fp32 gradient of every parameter that is trained."""
    for name, tensor in matched.items():
        if tensor.requires_grad:
            yield name, torch.zeros(tensor.shape, device=tensor.device) if tensor.grad is None else whole(tensor.grad)
