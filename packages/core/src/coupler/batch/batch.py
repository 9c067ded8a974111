"""Hold ragged columns over B sequences packed into T tokens.

Token columns have leading axis T, sequence columns leading axis B. Buffers are NumPy,
so that a Batch crosses processes with different torch versions and the controller never
imports torch. There is no padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from coupler.batch.partition import balance, contiguous, whole_units

# Up to this max / mean - 1 of their tokens, shards are ranges of rows without a copy.
RANGE_SLACK = 1e-3
# Up to this max / mean - 1 of their tokens, shards do not split prompt groups.
GROUP_SLACK = 0.02


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences of ``lengths[i]`` tokens each, T in all.

    Row t of a token column is about *predicting* token t: ``logprobs[t]`` is the
    log-probability of ``tokens[t]`` given the tokens before it in the same sequence. It
    is 0 on a sequence's first row, which nothing predicts.

    Attributes:
        lengths: [B] int64, which sums to T.
        tokens: token columns by name, each [T, ...].
        seqs: sequence columns by name, each [B, ...].

    Example:
        >>> b = Batch(np.array([2, 1]), {"tokens": np.array([5, 6, 7], np.int32)},
        {"reward": np.array([1.0, 0.0])})
        >>> b.take([1])["tokens"]
        array([7], dtype=int32)
    """

    lengths: np.ndarray
    tokens: Mapping[str, np.ndarray] = field(default_factory=dict)
    seqs: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total, rows = int(self.lengths.sum()), len(self.lengths)

        for name, column in self.tokens.items():
            if len(column) != total:
                raise ValueError(
                    f"token column {name!r} has {len(column)} rows, expected T={total}"
                )
        for name, column in self.seqs.items():
            if len(column) != rows:
                raise ValueError(
                    f"sequence column {name!r} has {len(column)} rows, expected B={rows}"
                )

        for name, column in (*self.tokens.items(), *self.seqs.items()):
            if column.dtype == object:
                raise ValueError(
                    f"column {name!r} holds Python objects; a column is numbers, booleans or "
                    "fixed-width text"
                )
        if both := self.tokens.keys() & self.seqs.keys():
            raise ValueError(f"{sorted(both)} are token and sequence columns at once")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def starts(self) -> np.ndarray:
        """Return the offset of each sequence in a token column, then T: [B + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def __getitem__(self, name: str) -> np.ndarray:
        for columns in (self.tokens, self.seqs):
            if name in columns:
                return columns[name]
        raise KeyError(
            f"the batch has no column {name!r}; it has {sorted([*self.tokens, *self.seqs])}"
        )

    def has(self, *names: str) -> bool:
        """Return whether all of these columns exist."""
        return all(name in self.tokens or name in self.seqs for name in names)

    def with_tokens(self, **columns: np.ndarray) -> Batch:
        """Add or replace token columns."""
        return Batch(self.lengths, {**self.tokens, **columns}, self.seqs)

    def with_seqs(self, **columns: np.ndarray) -> Batch:
        """Add or replace sequence columns."""
        return replace(self, seqs={**self.seqs, **columns})

    def select(self, *names: str) -> Batch:
        """Keep only these columns.

        Raises:
            KeyError: one of them does not exist.
        """
        for name in names:
            self[name]
        return replace(
            self,
            tokens={k: v for k, v in self.tokens.items() if k in names},
            seqs={k: v for k, v in self.seqs.items() if k in names},
        )

    def without(self, *names: str) -> Batch:
        """Drop these columns, where they are there."""
        return self.select(*(name for name in (*self.tokens, *self.seqs) if name not in names))

    def spread(self, per_sequence: np.ndarray) -> np.ndarray:
        """Repeat each sequence's value over its tokens: [B] -> [T]."""
        return np.repeat(per_sequence, self.lengths)

    def sum_by_sequence(self, per_token: np.ndarray) -> np.ndarray:
        """Sum each sequence's tokens in float64: [T] -> [B]."""
        owner = np.repeat(np.arange(len(self)), self.lengths)
        return np.bincount(owner, weights=per_token, minlength=len(self))

    def trajectories(self) -> tuple[np.ndarray, np.ndarray]:
        """Find the trajectories.

        Rows with equal ``trajectory`` are pieces of one rollout, and each carries its
        reward. Without that column every row is a trajectory.

        Returns:
            [N] the first row of each trajectory, and [B] the trajectory of each row.
        """
        if not self.has("trajectory"):
            return np.arange(len(self)), np.arange(len(self))
        _, first, of_row = np.unique(self["trajectory"], return_index=True, return_inverse=True)
        return first, of_row

    def take(self, index: Sequence[int] | np.ndarray) -> Batch:
        """Return the rows ``index`` in that order. An index may repeat."""
        index = np.asarray(index, dtype=np.int64)
        lengths, starts = self.lengths[index], self.starts[index]

        if _are_long(lengths):
            spans = _spans(starts, lengths)
            tokens = {
                k: np.concatenate([v[span] for span in spans]) for k, v in self.tokens.items()
            }
        else:
            pick = _positions(starts, lengths)
            tokens = {k: v[pick] for k, v in self.tokens.items()}

        seqs = {k: v[index] for k, v in self.seqs.items()}
        return Batch(lengths, tokens, seqs)

    def split(self, rows: Sequence[np.ndarray]) -> Iterator[Batch]:
        """Yield ``self.take(r)`` for each ``r`` in ``rows``.

        Ranges of rows are views instead of copies. Short sequences are copied in one
        pass over all parts.
        """
        if _are_ranges(rows):
            yield from self._ranges(rows)
            return
        if _are_long(self.lengths):
            yield from map(self.take, rows)
            return
        yield from self.take(np.concatenate(rows))._ranges(rows)

    def _ranges(self, rows: Sequence[np.ndarray]) -> Iterator[Batch]:
        """Yield as many rows as each of ``rows`` has, one range after the other."""
        ends = np.cumsum([len(r) for r in rows])
        offsets = self.starts[np.concatenate([[0], ends])].tolist()
        for end, size, a, b in zip(
            ends.tolist(), map(len, rows), offsets, offsets[1:], strict=False
        ):
            start = end - size
            tokens = {k: v[a:b] for k, v in self.tokens.items()}
            seqs = {k: v[start:end] for k, v in self.seqs.items()}
            yield Batch(self.lengths[start:end], tokens, seqs)

    def join(self, rows: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> np.ndarray:
        """Join the token column of each part of :meth:`split` in the order of this
        batch, [T, ...].
        """
        if _are_ranges(rows):
            return np.concatenate(parts)

        index = np.concatenate(rows)
        lengths, starts = self.lengths[index], self.starts[index]
        if not _are_long(lengths):
            flat = np.concatenate(parts)
            column = np.empty_like(flat)
            column[_positions(starts, lengths)] = flat
            return column

        column = np.empty((self.num_tokens, *parts[0].shape[1:]), parts[0].dtype)
        spans = iter(_spans(starts, lengths))
        for part_rows, part in zip(rows, parts, strict=True):
            start = 0
            for span in (next(spans) for _ in part_rows):
                end = start + span.stop - span.start
                column[span] = part[start:end]
                start = end
        return column

    def partition(self, num_shards: int) -> list[np.ndarray]:
        """Split rows into ``num_shards`` sorted index sets of near-equal token count.

        Some sets may be empty. Rows that share a ``unit`` (a preference pair, say) stay
        together. Without that column each row is a unit. Rows of a prompt ``group``
        stay together as long as shards stay within ``GROUP_SLACK``, because an engine
        computes the prompt of a group once.
        """

        def even(sizes: np.ndarray) -> list[np.ndarray]:
            return contiguous(sizes, num_shards, RANGE_SLACK) or balance(sizes, num_shards)

        def together(column: str) -> list[np.ndarray]:
            return whole_units(self.lengths, self.seqs[column], even)

        if "group" in self.seqs:
            shards = together("group")
            heaviest = max(int(self.lengths[rows].sum()) for rows in shards)
            if heaviest * num_shards <= (1 + GROUP_SLACK) * self.num_tokens:
                return shards
        return together("unit") if "unit" in self.seqs else even(self.lengths)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Join batches with the same columns.

        Raises:
            ValueError: there is no batch, or their columns differ.
        """
        if not batches:
            raise ValueError("concat needs at least one batch")
        first = batches[0]

        for other in batches[1:]:
            if other.tokens.keys() != first.tokens.keys() or other.seqs.keys() != first.seqs.keys():
                odd = (first.tokens.keys() ^ other.tokens.keys()) | (
                    first.seqs.keys() ^ other.seqs.keys()
                )
                raise ValueError(f"cannot join batches: {sorted(odd)} are in some of them only")

        return Batch(
            lengths=np.concatenate([b.lengths for b in batches]),
            tokens={k: concat([b.tokens[k] for b in batches]) for k in first.tokens},
            seqs={k: np.concatenate([b.seqs[k] for b in batches]) for k in first.seqs},
        )

    def save(self, path: Path) -> None:
        """Write an ``.npz`` without Python objects."""
        columns = {f"tokens/{k}": v for k, v in self.tokens.items()} | {
            f"seqs/{k}": v for k, v in self.seqs.items()
        }
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, lengths=self.lengths, **columns)

    @staticmethod
    def load(path: Path) -> Batch:
        """Read a file of :meth:`save`."""
        with np.load(path, allow_pickle=False) as file:
            tokens = {k.removeprefix("tokens/"): file[k] for k in file if k.startswith("tokens/")}
            seqs = {k.removeprefix("seqs/"): file[k] for k in file if k.startswith("seqs/")}
            return Batch(file["lengths"], tokens, seqs)


def concat(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Join token columns. Where rows have several widths, the narrower end in -1."""
    if len({column.shape[1:] for column in columns}) > 1:
        width = max(column.shape[1] for column in columns)
        columns = [
            np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=-1)
            for column in columns
        ]
    return np.concatenate(columns)


def _are_ranges(rows: Sequence[np.ndarray]) -> bool:
    """Return whether ``rows`` are ranges that follow each other from 0 on."""
    index = np.concatenate(rows)
    return bool((index == np.arange(len(index))).all())


def _are_long(lengths: np.ndarray) -> bool:
    """Return whether copying by sequence is faster than copying by token."""
    return len(lengths) > 0 and int(lengths.sum()) >= 64 * len(lengths)


def _spans(starts: np.ndarray, lengths: np.ndarray) -> list[slice]:
    return list(map(slice, starts.tolist(), (starts + lengths).tolist()))


def _positions(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the position of every token, sequence by sequence."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + within
