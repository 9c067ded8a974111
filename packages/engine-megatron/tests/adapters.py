"""Adapters for tests: which matrices have one, its A and B, and their gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from coupler.engine_kit.lora_names import names_of, random_like, weight_of
from coupler.engine_kit.peft_folder import write_adapter
from coupler.testing.models import rewrite
from coupler.testing.ranks import Arrays
from coupler.testing.reference import TransformersReference

RANK = 4
MIXTURE = {"target_modules": ["all-linear", "experts"]}


def adapted(reference: TransformersReference, targets: list[str]) -> list[str]:
    """Name the matrices of layers that a run with these targets adapts."""
    found = []
    for name, tensor in reference.tensors.items():
        module, is_expert, _ = name.partition(".experts.")
        end = f"{module}.experts" if is_expert else name.removesuffix(".weight")
        hit = any(end.endswith(f".{target}") for target in targets)
        rest = "all-linear" in targets and not is_expert and ".mlp.gate." not in name
        if tensor.ndim == 2 and ".layers." in name and (hit or rest):
            found.append(name)
    return found


def adapter(reference: TransformersReference, names: list[str], rank: int = RANK) -> Arrays:
    """Draw A and B, so that every product shows."""
    found = {}
    for name in names:
        rows, columns = reference.tensors[name].shape
        for part, shape in zip(names_of(name), ((rank, columns), (rows, rank)), strict=True):
            found[part] = random_like(part, np.empty(shape, np.float32))
    return found


def merged(
    reference: TransformersReference, pairs: Arrays, scale: float, folder: Path
) -> TransformersReference:
    """Write the model with the adapter added, as its reference."""
    tensors = {name: np.array(tensor) for name, tensor in reference.tensors.items()}
    for name in tensors:
        a, b = names_of(name)
        if a in pairs:
            tensors[name] = tensors[name] + scale * pairs[b] @ pairs[a]
    return TransformersReference(rewrite(reference.folder, folder, tensors))


def write(pairs: Arrays, folder: Path) -> None:
    """Write a PEFT folder whose scale is 1."""
    write_adapter(((n, torch.from_numpy(t)) for n, t in pairs.items()), folder, "", write=True)


def of_pairs(dense: Arrays, pairs: Arrays, scale: float) -> Arrays:
    """Return the gradient of A and B with W + scale B A for W, of that of W.

    dB = scale dW A^T and dA = scale B^T dW, where ``pairs`` holds scale * B.
    """
    found: Arrays = {}
    for weight in dict.fromkeys(weight for part in pairs if (weight := weight_of(part))):
        a, b = names_of(weight)
        found |= {a: pairs[b].T @ dense[weight], b: scale * dense[weight] @ pairs[a].T}
    return found
