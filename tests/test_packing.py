"""Tensors in a buffer, and the buffer's memory when a reader keeps the last one."""

from __future__ import annotations

import torch

from coupler.builtin.transports.torch.packing import Packer, let_go, tensor_of


def users(buffer: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)


def test_a_tensor_that_was_let_go_holds_no_memory() -> None:
    sent = [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7, dtype=torch.float64).to(torch.bfloat16)),
        ("c", torch.ones(0, 2)),
    ]
    buffer, entries = torch.zeros(4096, dtype=torch.uint8), []
    packer = Packer(
        lambda: buffer, lambda _, shipped: entries.extend(shipped), lambda *_: None, len(buffer)
    )
    packer.pack(iter(sent))
    before, kept = users(buffer), [tensor_of(buffer, entry) for entry in entries]
    for (name, tensor), entry, got in zip(sent, entries, kept, strict=True):
        assert entry["name"] == name and got.dtype == tensor.dtype and torch.equal(got, tensor)
    assert users(buffer) > before, "they share its memory"
    for got in kept:
        let_go(got)
    assert users(buffer) == before
