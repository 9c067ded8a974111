"""How sequences become a row, and what each context-parallel rank holds of it: nothing
is lost, and nothing made up.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler_engine_megatron.attention import positions
from coupler_engine_megatron.packing import Alignment, Packed, pack

CPU = torch.device("cpu")


def make_batch(lengths: tuple[int, ...]) -> Batch:
    """Every token is another one, from 1 on; what is predicted has gaps."""
    total = sum(lengths)
    first = np.cumsum(lengths) - lengths
    mask = np.arange(total) % 3 > 0
    mask[first[np.array(lengths) > 0]] = False
    temperature = np.linspace(0.5, 1.5, len(lengths)).astype(np.float32)
    columns = {"tokens": np.arange(1, total + 1, dtype=np.int32), "loss_mask": mask}
    return Batch(np.array(lengths), columns, {"temperature": temperature})


def packed_on(batch: Batch, context: int, split_tokens: int) -> list[Packed]:
    align = Alignment.of(context, split_tokens)
    return [pack(batch, CPU, align, context, rank) for rank in range(context)]


@pytest.mark.parametrize("lengths", [(7, 1, 12, 3), (0, 5, 0, 2), (8, 16)])
@pytest.mark.parametrize("split_tokens", [1, 2])
@pytest.mark.parametrize("context", [1, 2, 4])
def test_every_token_is_held_once_and_predicted_from_the_one_before(
    lengths: tuple[int, ...], split_tokens: int, context: int
) -> None:
    batch = make_batch(lengths)
    ranks = packed_on(batch, context, split_tokens)
    rows = np.flatnonzero(batch["loss_mask"])
    held = np.concatenate([packed.held for packed in ranks])
    assert sorted(held[held >= 0]) == list(range(batch.num_tokens))
    assert sorted(torch.cat([packed.places for packed in ranks]).tolist()) == list(range(len(rows)))
    within = np.concatenate([np.arange(n) for n in lengths])
    for packed in ranks:
        tokens, real = packed.tokens[0].numpy(), packed.held >= 0
        assert len(tokens) == len(held) / context and len(tokens) % split_tokens == 0
        np.testing.assert_array_equal(tokens[real], batch["tokens"][packed.held[real]])
        np.testing.assert_array_equal(packed.positions[0].numpy()[real], within[packed.held[real]])
        assert not tokens[~real].any(), "what fills up is no token of a sequence"
        mine = rows[packed.places.numpy()]
        np.testing.assert_array_equal(packed.rows.numpy(), rows)
        np.testing.assert_array_equal(packed.held[packed.sources.numpy()], mine - 1)
        np.testing.assert_array_equal(packed.targets.numpy(), batch["tokens"][mine])
        assert packed.temperature is not None
        np.testing.assert_array_equal(
            packed.temperature.numpy(), batch.spread(batch["temperature"])[mine]
        )


@pytest.mark.parametrize(("context", "split_tokens"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_sequences_are_filled_up_no_further_than_they_must(context: int, split_tokens: int) -> None:
    align = Alignment.of(context, split_tokens)
    packed = packed_on(make_batch((7, 1, 12)), context, split_tokens)[0]
    sizes = [end - start for start, end in pairwise(packed.params.cu_seqlens_q.tolist())]
    for size, length in zip(sizes, (7, 1, 12), strict=False):
        assert size % align.sequence == 0 and 0 <= size - length < align.sequence
    assert sum(sizes) % align.total == 0 and sum(sizes[3:]) < align.total
    assert packed.params.max_seqlen_q == max(sizes)
    if (context, split_tokens) == (1, 1):
        assert sizes == [7, 1, 12]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_order_of_chunks_is_undone_and_is_even(size: int) -> None:
    """Two chunks of each sequence for each rank, one from either end: under a causal
    mask, all see as many tokens.
    """
    length = 6 * size
    each = [positions(length, size, rank) for rank in range(size)]
    order = torch.cat(each)
    assert torch.equal(order[order.argsort()], torch.arange(length))
    assert len({int((part + 1).sum()) for part in each}) == 1
    for rank, part in enumerate(each):
        assert (
            part[:3].tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]
            and part[-1] == length - 1 - 3 * rank
        )


@pytest.mark.parametrize("context", [1, 2])
def test_an_empty_batch_is_a_row_that_nothing_reads(context: int) -> None:
    for packed in packed_on(make_batch((3, 4)).take([]), context, 2):
        assert packed.tokens.shape[1] > 0 and (packed.held == -1).all()
        assert packed.num_rows == len(packed.places) == 0


def test_a_first_token_that_is_to_be_predicted_is_refused() -> None:
    batch = make_batch((3, 4))
    mask = batch["loss_mask"].copy()
    mask[3] = True
    with pytest.raises(CouplerError, match="loss_mask is true on the first token"):
        packed_on(batch.with_tokens(loss_mask=mask), 1, 1)
