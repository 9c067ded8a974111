"""Say how parameters are made of a checkpoint's tensors, A and B of adapters included.

The functions are those of :mod:`coupler_engine_megatron.bridge`, which knows the
weights. A parameter ``linear_qkv.lora_B`` is made of the B of the queries, the keys and
the values in the order of the rows of ``linear_qkv.weight``.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from coupler.engine_kit.lora_names import names_of
from coupler_engine_megatron import bridge as weights
from coupler_engine_megatron import groups

# A or B of a linear map, with the number of an expert.
_ADAPTER = re.compile(r"\.lora_([AB])(\d*)$")
_OF_EXPERT = re.compile(r"(\.experts)\.\d+\..*$")


def is_adapter(name: str) -> bool:
    """Tell if the parameter is A or B of a linear map."""
    return bool(_ADAPTER.search(name))


def weight_of(name: str) -> str:
    """Return the name of the weight that A or B is for."""
    return _ADAPTER.sub(r".weight\2", name)


def target_of(weight: str) -> str:
    """Name what ``target_modules`` decides on: a linear map, or a layer's experts."""
    return _OF_EXPERT.sub(r"\1", weight)


def hf_names(bridge: Any, name: str) -> list[str]:
    """Name the checkpoint's tensors that a parameter is made of."""
    if not is_adapter(name):
        return weights.hf_names(bridge, name)
    which = int(not _is_a(name))
    return [names_of(weight)[which] for weight in weights.hf_names(bridge, weight_of(name))]


def has_halves(name: str) -> bool:
    """Tell if the parameter is a gate above an up on each tensor-parallel rank."""
    return not _is_a(name) and weights.has_halves(name)


def to_megatron(
    bridge: Any,
    name: str,
    tensors: list[Tensor],
) -> Tensor:
    """Join the checkpoint's tensors of one parameter, of all tensor-parallel ranks."""
    if not is_adapter(name):
        return weights.to_megatron(
            bridge,
            name,
            tensors,
        )
    if _is_a(name) or not _is_attention(name, len(tensors)):
        return torch.cat(tensors)
    heads, _ = _groups(bridge)
    return torch.cat([tensor.unflatten(0, (heads, -1)) for tensor in tensors], 1).flatten(0, 1)


def to_hf(
    bridge: Any,
    name: str,
    whole: Tensor,
) -> list[tuple[str, Tensor]]:
    """Undo :func:`to_megatron`."""
    if not is_adapter(name):
        return weights.to_hf(
            bridge,
            name,
            whole,
        )
    names = hf_names(bridge, name)
    if _is_a(name) or not _is_attention(name, len(names)):
        return list(
            zip(
                names,
                whole.chunk(len(names)),
                strict=True,
            )
        )

    heads, sizes = _groups(bridge)
    parts = whole.unflatten(0, (heads, -1)).split(sizes, 1)
    return [
        (each, part.flatten(0, 1))
        for each, part in zip(
            names,
            parts,
            strict=True,
        )
    ]


def split_tensor(
    bridge: Any,
    name: str,
    whole: Tensor,
    part: Tensor,
    size: int,
) -> list[Tensor]:
    """Cut a whole parameter into those of ``size`` tensor-parallel ranks."""
    if is_adapter(name) and part.shape == whole.shape:
        return [whole] * size
    if not _is_a(name):
        name = weight_of(name)
    return weights.split_tensor(
        bridge,
        name,
        whole,
        part,
        size,
    )


def join_to_hf(
    bridge: Any,
    name: str,
    parts: Tensor,
    part: Any,
) -> list[tuple[str, Tensor]]:
    """Undo :func:`to_megatron` and :func:`split_tensor`.

    Args:
        parts: [ranks, ...].
        part: says in ``partition_dim`` how the parameter is split.
    """
    if not is_adapter(name):
        return weights.join_to_hf(
            bridge,
            name,
            parts,
            part,
        )
    # B of an expert's gate and up has rows of both on each rank.
    if has_halves(name):
        halves = weights.join_to_hf(bridge, weight_of(name), parts, part)
        tensors = (tensor for _, tensor in halves)
        return list(zip(hf_names(bridge, name), tensors, strict=True))
    return to_hf(
        bridge,
        name,
        torch.cat(parts.unbind(), part.partition_dim),
    )


def rows_of_maps(
    bridge: Any,
    name: str,
    rows: int,
) -> Tensor:
    """Return [rows]: the checkpoint's map that each row of a weight is of, by number.

    The rows are those of this rank's part.
    """
    count = len(weights.hf_names(bridge, name))
    if not _is_attention(name, count):
        return torch.arange(count).repeat_interleave(rows // count)
    heads, sizes = _groups(bridge)
    every = torch.arange(count).repeat_interleave(torch.tensor(sizes)).repeat(heads)
    return every[groups.tensor().rank() * rows :][:rows]


def expand(b: Tensor, rows: Tensor) -> Tensor:
    """Put each row of B [..., out, r] at the columns of its own A: [..., out, k r].

    Args:
        rows: [out, k], 1 where a row is of a map.
    """
    return (b[..., None, :] * rows[:, :, None]).flatten(-2)


def _is_a(name: str) -> bool:
    found = _ADAPTER.search(name)
    return found is not None and found[1] == "A"


def _is_attention(name: str, maps: int) -> bool:
    return maps > 1 and "self_attention.linear_qkv." in name


def _groups(bridge: Any) -> tuple[int, list[int]]:
    """Return the groups of heads, and the rows of queries, keys and values of one."""
    config = bridge.hf_config
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_group = config.num_key_value_heads
    return of_group, [width * heads // of_group, width, width]
