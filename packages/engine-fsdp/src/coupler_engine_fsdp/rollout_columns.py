"""Keep the KV cache of the rollout in rows, one for each sequence.

Every running sequence writes the same column, so that rows are aligned at their right
end. A step writes one column for all of them with one copy, whatever their lengths.
Rows that join bring their past into the columns just left of it. Columns left of a
row's start are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of one cached token: ``layers`` x (key, value) x ``heads`` x ``dim``."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.heads * self.dim * self.dtype.itemsize


def cache_arguments(model: nn.Module, cache: object) -> dict[str, Any]:
    """Return the arguments that let ``model`` attend through ``cache``, of which older
    releases of transformers call one otherwise.
    """
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


class Prefill:
    """Cache of one prefill: every layer's results for ``rows`` x ``width`` tokens."""

    def __init__(self, shape: Shape, rows: int, width: int) -> None:
        size = (shape.layers, 2, rows, shape.heads, width, shape.dim)
        self.store = torch.empty(size, dtype=shape.dtype, device=shape.device)

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self.store[layer, 0], self.store[layer, 1] = key, value
        return key, value


class Columns:
    """Cache of the running sequences, rows 0 to ``num_rows`` - 1.

    Transformers calls :meth:`update` only.

    Attributes:
        store: [layers, 2, rows, heads, columns, dim]
        mask: [rows, 1, 1, columns], added to attention scores: 0, or -inf left of the
            row's start
        first, end: columns in use; the next step writes column ``end``.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.num_rows = self.first = self.end = 0
        self.starts: list[int] = []
        self._allocate(0, 0)

    def _allocate(self, rows: int, columns: int) -> None:
        shape = self.shape
        size = (shape.layers, 2, rows, shape.heads, columns, shape.dim)
        # Zeros, since a masked NaN would still be a NaN.
        self.store = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.mask = torch.zeros((rows, 1, 1, columns), dtype=shape.dtype, device=shape.device)

    @property
    def capacity(self) -> int:
        return self.store.shape[4]

    @property
    def used_mask(self) -> Tensor:
        """Mask [num_rows, 1, 1, width + 1] for the step that writes ``end``."""
        return self.mask[: self.num_rows, ..., self.first : self.end + 1]

    @property
    def width(self) -> int:
        return self.end - self.first

    def reserve(self, rows: int, past: int, future: int) -> None:
        """Make room for ``rows`` more rows of up to ``past`` tokens.

        If the cache must grow, it grows by ``future`` columns more.
        """
        rows += self.num_rows
        if not self.num_rows:
            self.first = self.end = past
        if rows <= self.store.shape[2] and past <= self.end < self.capacity:
            return

        end, old, old_mask = max(past, self.width), self.store, self.mask
        kept, moved = slice(self.first, self.end), slice(end - self.width, end)
        self._allocate(max(1 << (rows - 1).bit_length(), old.shape[2]), end + future)
        self.store[:, :, : self.num_rows, :, moved] = old[:, :, : self.num_rows, :, kept]
        self.mask[: self.num_rows, ..., moved] = old_mask[: self.num_rows, ..., kept]
        self.mask[: self.num_rows, ..., : moved.start] = -torch.inf

        self.starts = [start + end - self.end for start in self.starts]
        self.first, self.end = moved.start, end

    def join(self, past: Tensor) -> None:
        """Append a row with this ``past`` [layers, 2, heads, tokens, dim]."""
        row, start = self.num_rows, self.end - past.shape[3]
        self.store[:, :, row, :, start : self.end] = past
        self.mask[row, ..., :start] = -torch.inf
        self.mask[row, ..., start:] = 0
        self.starts.append(start)
        self.num_rows += 1
        self.first = min(self.first, start)

    def spread(self, first: int, sources: list[int]) -> None:
        """Copy rows ``sources`` into the rows from ``first`` on.

        The sources rise and are not below ``first``.
        """
        rows, used = slice(first, first + len(sources)), slice(self.first, self.end)
        index = torch.tensor(sources, device=self.shape.device)
        self.store[:, :, rows, :, used] = self.store[:, :, :, :, used].index_select(2, index)
        self.mask[rows] = self.mask.index_select(0, index)
        self.starts[first:] = [self.starts[source] for source in sources]
        self.num_rows = first + len(sources)

    def past(self, row: int, tokens: int) -> Tensor:
        """Return the first ``tokens`` cached tokens of a running row, as :meth:`join`
        takes.
        """
        start = self.starts[row]
        return self.store[:, :, row, :, start : start + tokens]

    def move(self, sources: list[int], holes: list[int], num_rows: int) -> None:
        """Put rows ``sources`` into ``holes`` and keep the first ``num_rows``."""
        used = self.store[:, :, :, :, self.first : self.end]
        # One by one: an index takes a CPU longer.
        for source, hole in zip(sources, holes, strict=True):
            used[:, :, hole] = used[:, :, source]
            self.mask[hole] = self.mask[source]
            self.starts[hole] = self.starts[source]
        del self.starts[num_rows:]
        self.num_rows = num_rows
        self.first = min(self.starts, default=self.end)

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write this step's column.

        Returns:
            Keys and values [num_rows, heads, width + 1, dim].
        """
        rows = self.store[layer, :, : self.num_rows]
        rows[0, :, :, self.end], rows[1, :, :, self.end] = key[:, :, 0], value[:, :, 0]
        keys, values = rows[:, :, :, self.first : self.end + 1].unbind()
        return keys, values

    def per_layer(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for every layer this step's column and the keys and values that end
        with it.

        The column [2, num_rows, heads, dim] is yet to be written. Keys and values are
        [num_rows * heads, width + 1, dim] each.
        """
        rows = self.store[:, :, : self.num_rows]
        keys, values = rows[..., self.first : self.end + 1, :].flatten(2, 3).unbind(1)
        return zip(rows[..., self.end, :].unbind(), keys.unbind(), values.unbind(), strict=True)


def mask_per_head(mask: Tensor, kv_heads: int) -> Tensor:
    """Map [n, 1, 1, width] to [n * kv heads, 1, width] for :func:`attend_columns`."""
    return mask.expand(-1, kv_heads, 1, -1).flatten(0, 1)


def attend_columns(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attend with one token per row, as [n * kv heads, group, D].

    Keys and values are [n * kv heads, width, D] each, and the result is as the query.

    Two batched products are used. PyTorch's fused kernel takes 2.5 times as long on a
    CPU at such shapes, and on a GPU it has no grouped heads together with a mask.
    """
    scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scaling)
    weights = scores.softmax(-1, dtype=torch.float32)
    return torch.bmm(weights.to(values.dtype), values)
