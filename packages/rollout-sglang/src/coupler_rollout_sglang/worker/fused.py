"""Sample tokens on a GPU, and take their log-probs, in one pass over the logits.

A batch of logits is the largest tensor of a decoding step. The softmax of it and noise
for each of its numbers, as tensors of their own, cost several times what the pass does.
"""
# pyright: reportMissingImports=false
# The environment that is type-checked need not have Triton.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Columns that share a call of the generator, which gives four numbers for each.
BLOCK = 1024


@triton.jit
def _exponential(u):
    """Return -log(1 - u), by its series where 1 - u would round u away."""
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return tl.where(u < 0.015625, series, -tl.log(1.0 - u))


@triton.jit
def _draw(
    logits,
    stride,
    temperatures,
    greedy,
    seeds,
    positions,
    tokens,
    logprobs,
    vocab,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    is_greedy = tl.load(greedy + row)
    seed = tl.load(seeds + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint32)
    lanes = tl.arange(0, block)

    # For each lane: the largest key so far with its column and its logit, and the
    # largest logit with the sum of exponentials relative to it.
    best = tl.full((block,), float("-inf"), tl.float32)
    column = tl.zeros((block,), tl.int32)
    chosen = tl.full((block,), float("-inf"), tl.float32)
    largest = tl.full((block,), -3.0e38, tl.float32)
    total = tl.zeros((block,), tl.float32)

    for start in range(0, vocab, 4 * block):
        counter = (start // 4 + lanes).to(tl.uint32)
        zeros = counter * 0
        bits = tl.philox(
            seed,
            counter,
            zeros + position,
            zeros,
            zeros,
        )
        for part in tl.static_range(4):
            columns = start + part * block + lanes
            x = tl.load(
                logits + row * stride + columns,
                columns < vocab,
                other=float("-inf"),
            )
            x = x.to(tl.float32) / temperature

            higher = tl.maximum(largest, x)
            total = total * tl.exp(largest - higher) + tl.exp(x - higher)
            largest = higher

            uniform = (bits[part].to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
            key = tl.where(
                is_greedy,
                x,
                x - tl.log(_exponential(uniform)),
            )
            better = key > best
            best = tl.where(better, key, best)
            column = tl.where(better, columns, column)
            chosen = tl.where(better, x, chosen)

    top = tl.max(largest, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    winner = tl.max(best, 0)
    token = tl.min(tl.where(best == winner, column, vocab), 0)
    logit = tl.max(tl.where(column == token, chosen, float("-inf")), 0)
    # NaN among the logits leaves no winner, and the sum is NaN then.
    tl.store(tokens + row, tl.minimum(token, vocab - 1))
    tl.store(logprobs + row, logit - log_total)


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    greedy: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token of each row by its seed and position.

    The largest of logit and Gumbel noise is a sample of the softmax (Gumbel-max). The
    noise is Philox's, counted by column and position: a row's token depends on no other
    row.

    Args:
        logits: [rows, tokens], of any floating dtype. A row lies in one piece.
        temperatures: [rows], float32.
        greedy: [rows], bool. Such a row gets its most likely token.
        seeds: [rows], int64, of which every bit counts.
        positions: [rows], integers below 2**32.

    Returns:
        Token ids, int32 [rows], and their natural log-probs under the softmax of
        logits / temperature, float32 [rows].
    """
    rows, vocab = logits.shape
    tokens = torch.empty(
        rows,
        dtype=torch.int32,
        device=logits.device,
    )
    logprobs = torch.empty_like(
        tokens,
        dtype=torch.float32,
    )

    launch: Any = _draw[(rows,)]
    launch(
        logits,
        logits.stride(0),
        temperatures.view(-1),
        greedy.view(-1),
        seeds.view(-1),
        positions.view(-1),
        tokens,
        logprobs,
        vocab,
        block=BLOCK,
        num_warps=8,
    )
    return tokens, logprobs
