"""Compute one decoding step of the running batch: tokens in, logits out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm
from transformers import PreTrainedModel

from coupler_engine_fsdp.rollout_columns import (
    Columns,
    attend_columns,
    cache_arguments,
    mask_per_head,
)

Step = Callable[[Tensor, Tensor, Columns], Tensor]
"""Tokens [rows], positions [rows] and the cache give logits [rows, V]."""
DENSE = ("llama", "qwen2", "qwen3")
"""config.model_type of the families that DenseStep knows."""
MANY = 16
"""Rows from which on weights times rows take a CPU less than rows times weights."""


def step_of(model: PreTrainedModel) -> Step:
    """Return the fastest step for this model.

    It is :class:`DenseStep` for the families that it knows, and transformers' own
    forward for all others.
    """
    if model.config.model_type in DENSE:
        return DenseStep(model)

    def step(tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        out = model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=columns.used_mask,
            **cache_arguments(model, columns),
        )
        return out.logits[:, 0]

    return step


class Linear(NamedTuple):
    """Projection [in] -> [out], or several projections of one input."""

    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    """Root-mean-square norm."""

    weight: Tensor
    eps: float
    root_eps: Tensor
    scale: Tensor
    """1 / sqrt(size). PyTorch would make a tensor of a number each time."""


class Layer(NamedTuple):
    """The tensors that a step reads of a layer.

    Looking a parameter up in its module takes longer than many a small operation.
    """

    before_attention: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    out: Linear
    before_mlp: Norm
    gate_up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear
    head_dim: int
    scaling: float


class DenseStep:
    """A Llama-like model's forward for one token per row, in a third of the operations.

    A step of a small model, or of few rows, costs what launching its operations costs.
    Projections of one input are therefore stacked. The model's parameters become views
    of the stacks, so that an update of the one is one of the other.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base = cast(Any, model.base_model)
        self.rotary = base.rotary_emb
        self.embeddings, self.norm = base.embed_tokens.weight, _norm_of(base.norm)
        self.head = _linear_of(cast(nn.Linear, model.get_output_embeddings()))
        self.layers = [_layer_of(layer) for layer in base.layers]
        # [positions, 2 D]: cos and sin
        self.rotations = torch.empty(0)

    def __call__(self, tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        hidden = embedding(tokens, self.embeddings)  # [n, H]

        # No position is beyond the capacity.
        if len(self.rotations) < columns.capacity:
            self._tabulate(hidden, columns.capacity)
        cos, sin = embedding(positions, self.rotations)[:, None].chunk(2, -1)  # [n, 1, D]

        mask = mask_per_head(columns.used_mask, columns.shape.heads)
        for layer, cached in zip(self.layers, columns.per_layer(), strict=True):
            qkv = linear(_norm(hidden, layer.before_attention), *layer.qkv)
            out = _attend(layer, qkv.view(len(tokens), -1, layer.head_dim), cos, sin, mask, *cached)
            hidden = _linear_added(hidden, out, layer.out)
            gated = _gated(_norm(hidden, layer.before_mlp), layer)
            hidden = _linear_added(hidden, gated, layer.down)
        return linear(_norm(hidden, self.norm), *self.head)

    def _tabulate(self, like: Tensor, num_positions: int) -> None:
        """Compute the rotary embedding of every position.

        ``sin`` gets the sign of what it multiplies.
        """
        cos, sin = self.rotary(like, torch.arange(num_positions, device=like.device)[None])
        sin[..., : sin.shape[-1] // 2].neg_()
        self.rotations = torch.cat((cos[0], sin[0]), -1)


def _attend(
    layer: Layer,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    column: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Attend with one token per row: [n, heads + 2 kv heads, D] -> [n, heads * D].

    The cache's tensors are as :meth:`Columns.per_layer` yields them.
    """
    _, n, kv_heads, dim = column.shape
    heads = qkv.shape[1] - 2 * kv_heads
    query, rotated = qkv[:, :heads], qkv[:, :-kv_heads]

    if layer.query_norm is not None and layer.key_norm is not None:
        query.copy_(_norm(query, layer.query_norm))
        rotated[:, heads:] = _norm(rotated[:, heads:], layer.key_norm)

    rolled = rotated.roll(dim // 2, -1)
    rotated.mul_(cos).addcmul_(rolled, sin)
    column.copy_(qkv[:, heads:].view(n, 2, kv_heads, dim).transpose(0, 1))

    return attend_columns(
        query.reshape(n * kv_heads, -1, dim), keys, values, mask, layer.scaling
    ).view(n, -1)


def _gated(x: Tensor, layer: Layer) -> Tensor:
    """Compute the gated half of the MLP: [n, H] -> [n, intermediate]."""
    weight, bias = layer.gate_up
    if len(x) < MANY or x.is_cuda or bias is not None:
        gate, up = linear(x, weight, bias).chunk(2, -1)
        return layer.activation(gate) * up
    gate, up = torch.mm(weight, x.t()).chunk(2)
    return (layer.activation(gate) * up).t()


def _linear_added(to: Tensor, x: Tensor, projection: Linear) -> Tensor:
    """Return [n, out] + the projection of [n, in]."""
    if projection.bias is not None:
        return linear(x, *projection).add_(to)
    return torch.addmm(to, x, projection.weight.t())


def _norm(x: Tensor, norm: Norm) -> Tensor:
    """Root-mean-square norm over the last axis.

    On a CPU PyTorch's own norm is 8 operations, and this is 5.
    """
    if x.is_cuda or x.dtype != torch.float32:
        return rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    root_mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(norm.scale)
    return torch.mul(x, norm.weight).div_(torch.hypot(root_mean, norm.root_eps))


def _layer_of(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attention, "q_norm")
    return Layer(
        before_attention=_norm_of(layer.input_layernorm),
        qkv=_stack(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_norm_of(attention.q_norm) if normed else None,
        key_norm=_norm_of(attention.k_norm) if normed else None,
        out=_linear_of(attention.o_proj),
        before_mlp=_norm_of(layer.post_attention_layernorm),
        gate_up=_stack(mlp.gate_proj, mlp.up_proj),
        activation=mlp.act_fn,
        down=_linear_of(mlp.down_proj),
        head_dim=attention.head_dim,
        scaling=attention.scaling,
    )


def _norm_of(module: Any) -> Norm:
    eps = module.variance_epsilon
    return Norm(
        module.weight, eps, torch.tensor(math.sqrt(eps)), torch.tensor(len(module.weight) ** -0.5)
    )


def _linear_of(module: nn.Linear) -> Linear:
    return Linear(module.weight, module.bias)


def _stack(*projections: nn.Linear) -> Linear:
    """Stack weights and biases.

    The projections' own parameters become views of the stacks.
    """
    weight = _share([projection.weight for projection in projections])
    biases = [projection.bias for projection in projections if projection.bias is not None]
    return Linear(weight, _share(biases) if biases else None)


def _share(parameters: Sequence[Tensor]) -> Tensor:
    stack = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(
        parameters, stack.split([len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = view
    return stack
