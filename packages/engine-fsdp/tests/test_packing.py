"""What is computed once although several sequences hold it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coupler.batch import Batch
from coupler_engine_fsdp.packing import Packed, pack, split

CPU = torch.device("cpu")


def batch_of(*sequences: tuple[list[int], list[int]]) -> Batch:
    """Sequences of (prompt, completion)."""
    tokens = [token for prompt, completion in sequences for token in (*prompt, *completion)]
    mask = [flag for prompt, completion in sequences for flag in [False] * len(prompt) + [True] * len(completion)]
    lengths = np.array([len(prompt) + len(completion) for prompt, completion in sequences])
    return Batch(lengths, {"tokens": np.array(tokens, np.int32), "loss_mask": np.array(mask)})


def context_of(packed: Packed, row: int) -> list[int]:
    """The tokens that row ``row`` of the prediction is made from, as the attention of its source sees them."""
    source = int(packed.sources[row])
    piece = int(torch.searchsorted(packed.packing.cu_queries, source, right=True)) - 1
    begin, end = packed.packing.cu_keys[piece : piece + 2].tolist()
    keys = torch.arange(begin, end) if packed.packing.keys is None else packed.packing.keys[begin:end]
    behind = int(packed.packing.cu_queries[piece + 1]) - 1 - source
    seen = keys[: len(keys) - behind]
    assert packed.positions[0, seen].tolist() == list(range(len(seen)))
    return packed.tokens[0, seen].tolist()


def test_a_prompt_of_several_completions_stands_there_once() -> None:
    batch = batch_of(([1, 2, 3], [4, 5]), ([7, 8], [9]), ([1, 2, 3], [6]), ([1, 2, 3], []), ([1, 2], [3, 4]))
    packed = pack(batch, CPU)
    assert sorted(packed.tokens[0].tolist()) == sorted([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4])
    assert packed.rows.tolist() == [3, 4, 7, 11, 17, 18]
    contexts = [context_of(packed, row) for row in range(6)]
    assert contexts == [[1, 2, 3], [1, 2, 3, 4], [7, 8], [1, 2, 3], [1, 2], [1, 2, 3]]
    assert packed.targets.tolist() == [4, 5, 9, 6, 3, 4]


def test_nothing_is_gathered_where_little_repeats() -> None:
    packed = pack(batch_of(([1], list(range(2, 40))), ([1], list(range(40, 60)))), CPU)
    assert packed.packing.keys is None
    assert packed.tokens.shape == (1, 60)


@pytest.mark.parametrize("seed", range(5))
def test_every_prediction_sees_its_own_sequence(seed: int) -> None:
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 9, random.integers(1, 6)).tolist() for _ in range(3)]
    sequences = [(prompts[i], random.integers(0, 9, random.integers(0, 5)).tolist()) for i in random.integers(0, 3, 12)]
    packed = pack(batch_of(*sequences), CPU)
    expected = [prompt + done[:i] for prompt, done in sequences for i in range(len(done))]
    assert [context_of(packed, row) for row in range(len(expected))] == expected


@pytest.mark.parametrize(("max_tokens", "together"), [(40, True), (12, False)])
def test_micro_batches_keep_a_prompt_group_together_that_fits(max_tokens: int, together: bool) -> None:
    batch = Batch(np.full(12, 5), {"tokens": np.zeros(60, np.int32)}, {"group": np.arange(12) % 3})
    parts = split(batch, max_tokens)
    assert max(5 * len(part) for part in parts) <= max_tokens
    assert (sum(len(set((part % 3).tolist())) for part in parts) == 3) == together
