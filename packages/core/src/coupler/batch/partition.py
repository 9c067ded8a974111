"""Split weighted items over k parts so that no part is much heavier than the mean."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

_FEW_PARTS = 32
# Above this max / mean - 1 items are swapped once.
_TOLERANCE = 5e-4
# For one swap at most this many pairs of items are compared.
_MAX_PAIRS = 1 << 20
# This many of the lightest items are placed one by one, which evens out the others.
_EXACT_TAIL = 4096


def balance(weights: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Partition items into ``num_parts`` sorted index sets of near-equal total weight.

    Some sets may be empty. The rule is longest processing time first (Graham 1969): the
    heaviest item goes onto the lightest part. With many parts, a round of items is
    placed at a time, on all parts that the rule would reach before coming back to one
    of them. With few parts, the heavy items are dealt back and forth. The lightest
    items are placed one by one, which evens out the rest.

    Args:
        weights: [n] non-negative, for example tokens per sequence.
        num_parts: k >= 1.
    """
    order = np.argsort(-weights, kind="stable")
    owner = np.empty(len(weights), np.int64)
    load = np.zeros(num_parts)
    placed, head = 0, max(len(order) - _EXACT_TAIL, 0)

    if num_parts < _FEW_PARTS:
        placed = head - head % num_parts
        parts = np.tile(np.arange(num_parts), (placed // num_parts, 1))
        parts[1::2] = parts[1::2, ::-1]
        owner[order[:placed]] = parts.ravel()
        load = np.bincount(parts.ravel(), weights=weights[order[:placed]], minlength=num_parts)

    while placed < head:
        lightest = np.argsort(load, kind="stable")
        # parts that get one item each before any of them would get a second
        after_one = load[lightest[0]] + weights[order[placed]]
        reach = int(np.searchsorted(load[lightest], after_one, side="right"))
        items = order[placed : placed + reach]
        owner[items] = lightest[: len(items)]
        load[lightest[: len(items)]] += weights[items]
        placed += len(items)

    heap = [(float(total), part) for part, total in enumerate(load)]
    heapq.heapify(heap)
    for item in order[placed:].tolist():
        total, part = heap[0]
        owner[item] = part
        heapq.heapreplace(heap, (total + float(weights[item]), part))

    by_owner = np.argsort(owner, kind="stable")
    parts = np.split(by_owner, np.cumsum(np.bincount(owner, minlength=num_parts))[:-1])
    load = np.bincount(owner, weights=weights, minlength=num_parts)
    if len(weights) and load.max() > (1 + _TOLERANCE) * load.mean():
        _swap(parts, weights, load)
    return parts


def contiguous(weights: np.ndarray, num_parts: int, slack: float) -> list[np.ndarray]:
    """Cut items into ``num_parts`` ranges of near-equal total weight.

    Returns:
        No range if ``max / mean - 1`` of their weights would exceed ``slack``.
    """
    ends = np.cumsum(weights)
    if not len(weights) or ends[-1] <= 0:
        return []

    # the nearer of the two boundaries around each goal
    goals = ends[-1] * np.arange(1, num_parts) / num_parts
    after = np.minimum(np.searchsorted(ends, goals), len(ends) - 1)
    cuts = after + (goals - (ends[after] - weights[after]) > ends[after] - goals)

    bounds = np.concatenate([[0], cuts, [len(ends)]])
    heaviest = np.diff(np.concatenate([[0], ends])[bounds]).max()
    if heaviest * num_parts > (1 + slack) * ends[-1]:
        return []
    return np.split(np.arange(len(weights)), cuts)


def _swap(parts: list[np.ndarray], weights: np.ndarray, load: np.ndarray) -> None:
    """Swap one item of the heaviest part with one of the lightest, so that both meet
    halfway, then do the same with the second heaviest, and so on.
    """
    order = np.argsort(load, kind="stable")
    for light, heavy in zip(order[: len(order) // 2], order[::-1], strict=False):
        if not 0 < len(parts[light]) * len(parts[heavy]) <= _MAX_PAIRS:
            continue
        gain = np.subtract.outer(weights[parts[heavy]], weights[parts[light]])
        half = (load[heavy] - load[light]) / 2
        give, take = np.unravel_index(np.abs(gain - half).argmin(), gain.shape)
        if abs(gain[give, take] - half) < half:
            parts[heavy][give], parts[light][take] = parts[light][take], parts[heavy][give]
            parts[heavy].sort()
            parts[light].sort()


def whole_units(
    lengths: np.ndarray, unit: np.ndarray, split: Callable[[np.ndarray], list[np.ndarray]]
) -> list[np.ndarray]:
    """Split rows so that rows that share a ``unit`` stay together.

    Args:
        split: cuts the total lengths of units, which come in the order of rows.

    Returns:
        One sorted set of rows per part of ``split``.
    """
    _, first, index = np.unique(unit, return_index=True, return_inverse=True)
    index = np.argsort(np.argsort(first))[index]
    parts = split(np.bincount(index, weights=lengths).astype(np.int64))
    owner = np.empty(index.max(initial=-1) + 1, np.int64)
    for i, part in enumerate(parts):
        owner[part] = i
    of_row = owner[index]
    ends = np.cumsum(np.bincount(of_row, minlength=len(parts)))
    return np.split(np.argsort(of_row, kind="stable"), ends[:-1])


def micro_batches(lengths: np.ndarray, max_tokens: int, at_least: int = 1) -> list[np.ndarray]:
    """Split rows into the fewest balanced groups of at most ``max_tokens`` each.

    There are never fewer groups than ``at_least``.

    Raises:
        ValueError: one row alone is longer than ``max_tokens``.
    """
    if len(lengths) and int(lengths.max()) > max_tokens:
        raise ValueError(
            f"a sequence of {int(lengths.max())} tokens exceeds max_tokens_per_gpu={max_tokens}"
        )
    count = max(at_least, -(-int(lengths.sum()) // max_tokens), 1)
    while True:
        groups = balance(lengths, count)
        if all(int(lengths[g].sum()) <= max_tokens for g in groups):
            return groups
        count += 1
