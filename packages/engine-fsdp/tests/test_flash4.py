"""The operators around flash-attn-4, with a stand-in for its kernels, which need a
GPU.
"""

from __future__ import annotations

import shutil
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from coupler_engine_fsdp.attention_flash4 import flash_4, flash_4_backward

HEADS, KV_HEADS, DIM = 4, 2, 8
QUERIES, KEYS = (3, 2), (3, 5)  # the second piece has a prompt before it


def by_piece(ends: tuple[Tensor, Tensor]) -> list[tuple[slice, slice]]:
    """Queries and keys of each piece."""
    queries, keys = (end.tolist() for end in ends)
    return [(slice(*q), slice(*k)) for q, k in zip(pairwise(queries), pairwise(keys), strict=True)]


def probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Causal ones of a piece, [heads, queries, keys]; its last query sees all keys."""
    scores = (
        torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(HEADS // KV_HEADS, 1)) * scale
    )
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def stand_in_forward(query, key, value, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, **_):
    outs = []
    for q, k in by_piece((cu_seqlens_q, cu_seqlens_k)):
        attention = probabilities(query[q], key[k], softmax_scale)
        outs.append(
            torch.einsum(
                "hqk,khd->qhd", attention, value[k].repeat_interleave(HEADS // KV_HEADS, 1)
            )
        )
    return torch.cat(outs), query.new_zeros(query.shape[1], query.shape[0])


def stand_in_backward(
    query, key, value, out, grad, lse, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, **_
):
    """Gradients with the strides of their tensors: ``torch.zeros_like``, as the kernels
    make them.
    """
    assert out.shape == grad.shape
    assert lse.shape == (query.shape[1], query.shape[0])
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for q, k in by_piece((cu_seqlens_q, cu_seqlens_k)):
        attention = probabilities(query[q], key[k], softmax_scale)
        keys, values = (x[k].repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
        towards = torch.einsum("qhd,khd->hqk", grad[q], values)
        scores = attention * (towards - (towards * attention).sum(-1, keepdim=True)) * softmax_scale
        grads[0][q] = torch.einsum("hqk,khd->qhd", scores, keys)
        for x, whole in (
            (grads[1], torch.einsum("hqk,qhd->khd", scores, query[q])),
            (grads[2], torch.einsum("hqk,qhd->khd", attention, grad[q])),
        ):
            x[k] = whole.unflatten(1, (KV_HEADS, -1)).sum(2)
    return tuple(grads)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = stand_in_forward, stand_in_backward
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)


def tensors(contiguous: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; gathered keys have their heads before their tokens in
    memory.
    """
    torch.manual_seed(0)
    query = torch.randn(sum(QUERIES), HEADS, DIM)
    key, value = (torch.randn(KV_HEADS, sum(KEYS), DIM).transpose(0, 1) for _ in range(2))
    return (query, key.contiguous(), value.contiguous()) if contiguous else (query, key, value)


def further() -> tuple[object, ...]:
    ends = (
        torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)
        for sizes in (QUERIES, KEYS)
    )
    return *ends, max(QUERIES), max(KEYS), DIM**-0.5, 0


@pytest.mark.parametrize("contiguous", [True, False], ids=["plain", "gathered"])
def test_the_operators_keep_what_they_promise_to_a_compiler(contiguous: bool) -> None:
    """Shapes, dtypes and strides are those of the fake kernels, forward and
    backward.
    """
    inputs = [x.requires_grad_() for x in tensors(contiguous)]
    torch.library.opcheck(flash_4, (*inputs, *further()))


@pytest.mark.parametrize("contiguous", [True, False], ids=["plain", "gathered"])
def test_gradients_have_the_strides_of_their_fakes(contiguous: bool) -> None:
    query, key, value = tensors(contiguous)
    out, lse = flash_4(query, key, value, *further())
    grads = flash_4_backward(torch.ones_like(out), query, key, value, out, lse, *further())
    assert [grad.is_contiguous() for grad in grads] == [True, True, True]
    torch.library.opcheck(
        flash_4_backward,
        (torch.ones_like(out), query, key, value, out, lse, *further()),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiled_layer_with_gathered_keys_has_the_gradient_of_an_eager_one() -> None:
    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_4(query * 2, key * 2, value * 2, *further())[0].square().sum()

    grads = []
    for run in (layer, torch.compile(layer)):
        inputs = [x.requires_grad_() for x in tensors(contiguous=False)]
        run(*inputs).backward()
        grads.append([x.grad for x in inputs])
    for got, want in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(got, want)
