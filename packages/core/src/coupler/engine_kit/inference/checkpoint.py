"""Read which tensors a checkpoint has, and which layers an adapter can be for.

Both a rollout's process and its engine's model workers use this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from safetensors import safe_open

from coupler.system.files import read_json

INDEX = "model.safetensors.index.json"
_OF_LAYER = re.compile(r".*\.\d+\.(?:.+\.)?([^.]+)\.weight")
# Experts, and the routers that choose among them.
_NOT_LINEAR = re.compile(r".*\.experts\.|.*\.gate\.weight$")


def linear_maps(folder: Path) -> list[str]:
    """Return the last names of the linear maps in a checkpoint's layers, as ``q_proj``.

    The list is empty if the folder has no checkpoint. Embeddings and the head stand
    outside of layers and are left out: an adapter's place there costs memory and time
    of every token. Experts are left out too: their updates travel added.
    """
    tensors = checkpoint_tensors(folder)
    found = ((_OF_LAYER.fullmatch(name), name, shape) for name, shape in tensors.items())
    return sorted(
        {
            of[1]
            for of, name, shape in found
            if of and len(shape) == 2 and not _NOT_LINEAR.match(name)
        }
    )


def has_experts(folder: Path) -> bool:
    """Tell if a checkpoint is of a mixture of experts."""
    return any(".experts." in name for name in checkpoint_tensors(folder))


@cache
def checkpoint_tensors(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every tensor in a model folder, by name.

    A folder may have none. Its files are opened once in a process.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def checkpoint_names(folder: Path) -> set[str]:
    """Return the names of all of a model's tensors, with those in absent files."""
    index = folder / INDEX
    if index.exists():
        return set(read_json(index)["weight_map"])
    return set(checkpoint_tensors(folder))
