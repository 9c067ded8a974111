"""Read which tensors a checkpoint has, and which layers an adapter can be for.

The rollout's process and vLLM's model workers both do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from safetensors import safe_open

INDEX = "model.safetensors.index.json"
_OF_LAYER = re.compile(r".*\.\d+\.(?:.+\.)?([^.]+)\.weight")
_NOT_LINEAR = re.compile(r".*\.experts\.|.*\.gate\.weight$")  # experts, and routers that choose among them


def linear_maps(folder: Path) -> list[str]:
    """Last names of the linear maps in the layers of a checkpoint, as ``q_proj``; none where there is no checkpoint.

    What stands outside of layers, embeddings and head, is left as it is: an adapter's place there costs memory and time
    of every token. So are experts, which no engine adapts.
    """
    tensors = checkpoint_tensors(folder)
    found = ((_OF_LAYER.fullmatch(name), name, shape) for name, shape in tensors.items())
    return sorted({of[1] for of, name, shape in found if of and len(shape) == 2 and not _NOT_LINEAR.match(name)})


def has_experts(folder: Path) -> bool:
    """Whether a checkpoint is of a mixture of experts."""
    return any(".experts." in name for name in checkpoint_tensors(folder))


@cache
def checkpoint_tensors(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Shape of every tensor in a model folder, by name; a folder may have none. Files are opened once in a process."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def checkpoint_names(folder: Path) -> set[str]:
    """Names of every tensor of a model, those in files that are not there included."""
    index = folder / INDEX
    if index.exists():
        return set(json.loads(index.read_text())["weight_map"])
    return set(checkpoint_tensors(folder))
