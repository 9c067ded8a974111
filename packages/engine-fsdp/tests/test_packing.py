"""What is computed once although several sequences hold it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler_engine_fsdp.attention import BLOCK, Packing, Piece, packed_attention
from coupler_engine_fsdp.packing import Packed, pack, split

CPU = torch.device("cpu")


def batch_of(*sequences: tuple[list[int], list[int]]) -> Batch:
    """Sequences of (prompt, completion)."""
    tokens = [token for prompt, completion in sequences for token in (*prompt, *completion)]
    mask = [
        flag
        for prompt, completion in sequences
        for flag in [False] * len(prompt) + [True] * len(completion)
    ]
    lengths = np.array([len(prompt) + len(completion) for prompt, completion in sequences])
    return Batch(lengths, {"tokens": np.array(tokens, np.int32), "loss_mask": np.array(mask)})


def context_of(packed: Packed, row: int) -> list[int]:
    """The tokens that row ``row`` of the prediction is made from, as the attention of
    its source sees them.
    """
    source = int(packed.sources[row])
    piece = int(torch.searchsorted(packed.packing.cu_queries, source, right=True)) - 1
    begin, end = packed.packing.cu_keys[piece : piece + 2].tolist()
    keys = (
        torch.arange(begin, end) if packed.packing.keys is None else packed.packing.keys[begin:end]
    )
    behind = int(packed.packing.cu_queries[piece + 1]) - 1 - source
    seen = keys[: len(keys) - behind]
    assert packed.positions[0, seen].tolist() == list(range(len(seen)))
    return packed.tokens[0, seen].tolist()


def test_a_prompt_of_several_completions_stands_there_once() -> None:
    batch = batch_of(
        ([1, 2, 3], [4, 5]), ([7, 8], [9]), ([1, 2, 3], [6]), ([1, 2, 3], []), ([1, 2], [3, 4])
    )
    packed = pack(batch, CPU)
    assert sorted(packed.tokens[0].tolist()) == sorted([1, 2, 3, 4, 7, 8, 1, 2, 3])
    assert packed.rows.tolist() == [3, 4, 7, 11, 17, 18]
    contexts = [context_of(packed, row) for row in range(6)]
    assert contexts == [[1, 2, 3], [1, 2, 3, 4], [7, 8], [1, 2, 3], [1, 2], [1, 2, 3]]
    assert packed.targets.tolist() == [4, 5, 9, 6, 3, 4]


def test_nothing_is_gathered_where_little_repeats() -> None:
    packed = pack(batch_of(([1], list(range(2, 40))), ([1], list(range(40, 60)))), CPU)
    assert packed.packing.keys is None
    assert packed.tokens.shape == (1, 58)


def test_what_nothing_is_predicted_from_is_not_computed() -> None:
    """The last predicted token of a sequence, and an observation behind it; a sequence
    without any is whole.
    """
    tokens, mask = (
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        [False, True, False, True, False, False, False, False, True, False],
    )
    batch = Batch(
        np.array([6, 2, 2]), {"tokens": np.array(tokens, np.int32), "loss_mask": np.array(mask)}
    )
    with pytest.raises(CouplerError, match="first token of a sequence"):
        pack(batch, CPU)
    batch = batch.with_tokens(loss_mask=np.array([*mask[:8], False, True]))
    packed = pack(batch, CPU)
    assert packed.tokens[0].tolist() == [1, 2, 3, 7, 8, 9]
    assert [context_of(packed, row) for row in range(3)] == [[1], [1, 2, 3], [9]]


@pytest.mark.parametrize("seed", range(5))
def test_every_prediction_sees_its_own_sequence(seed: int) -> None:
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 9, random.integers(1, 6)).tolist() for _ in range(3)]
    sequences = [
        (prompts[i], random.integers(0, 9, random.integers(0, 5)).tolist())
        for i in random.integers(0, 3, 12)
    ]
    packed = pack(batch_of(*sequences), CPU)
    expected = [prompt + done[:i] for prompt, done in sequences for i in range(len(done))]
    assert [context_of(packed, row) for row in range(len(expected))] == expected


@pytest.mark.parametrize("window", [None, 30])
def test_blocks_of_dense_attention_see_what_each_piece_sees(window: int | None) -> None:
    """Short sequences in one block, a family cut into several, a prompt and a
    completion longer than a block.
    """
    sizes = [
        (5, []),
        (7, [40, 60, 50, 90]),
        (3, []),
        (2, [4, 6]),
        (BLOCK + 20, [9, BLOCK + 5, 60, 70]),
        (BLOCK * 2, []),
    ]
    pieces: list[Piece] = []
    for prompt, completions in sizes:
        start = pieces[-1].end if pieces else 0
        pieces.append(Piece(start, start + prompt, start, start))
        for size in completions:
            pieces.append(Piece(pieces[-1].end, pieces[-1].end + size, start, start + prompt))
    total = pieces[-1].end
    seen = torch.zeros(total, total, dtype=torch.bool)
    position = torch.zeros(total, dtype=torch.int64)
    for piece in pieces:
        before, own = (
            torch.arange(piece.prompt_begin, piece.prompt_end),
            torch.arange(piece.begin, piece.end),
        )
        position[own] = torch.arange(len(own)) + len(before)
        seen[own[:, None], before] = True
        seen[own[:, None], own] = own[:, None] >= own
    if window is not None:
        seen &= position[:, None] - position < window
    torch.manual_seed(0)
    inputs = query, key, value = [
        torch.randn(1, heads, total, 8, requires_grad=True) for heads in (4, 2, 2)
    ]
    blocked = packed_attention(
        torch.nn.Module(), query, key, value, None, None, window, Packing.of(pieces, CPU)
    )[0]
    dense = scaled_dot_product_attention(query, key, value, seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(blocked, dense, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(dense)
    got, want = (torch.autograd.grad(out, inputs, slope) for out in (blocked, dense))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("max_tokens", "together"), [(40, True), (12, False)])
def test_micro_batches_keep_a_prompt_group_together_that_fits(
    max_tokens: int, together: bool
) -> None:
    batch = Batch(np.full(12, 5), {"tokens": np.zeros(60, np.int32)}, {"group": np.arange(12) % 3})
    parts = split(batch, max_tokens)
    assert max(5 * len(part) for part in parts) <= max_tokens
    assert (sum(len(set((part % 3).tolist())) for part in parts) == 3) == together
