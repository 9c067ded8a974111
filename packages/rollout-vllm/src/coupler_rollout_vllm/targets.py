"""Which layers of a model vLLM makes ready for an adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

_OF_LAYER = re.compile(r".*\.\d+\.(?:.+\.)?([^.]+)\.weight")
_NOT_LINEAR = re.compile(r".*\.experts\.|.*\.gate\.weight$")  # experts, and routers that choose among them


def linear_maps(folder: Path) -> list[str]:
    """Last names of the linear maps in the layers of a checkpoint, as ``q_proj``; none where there is no checkpoint.

    What stands outside of layers, embeddings and head, is left as it is: an adapter's place there costs memory and time
    of every token. So are experts, which no engine adapts.
    """
    found = ((_OF_LAYER.fullmatch(name), name, shape) for name, shape in _tensors(folder))
    return sorted({of[1] for of, name, shape in found if of and len(shape) == 2 and not _NOT_LINEAR.match(name)})


def has_experts(folder: Path) -> bool:
    """Whether a checkpoint is of a mixture of experts."""
    return any(".experts." in name for name, _ in _tensors(folder))


def _tensors(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every tensor; none is read."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_slice(name).get_shape()) for name in list(file.keys()))
