"""Batch continuously: sequences join and leave one running batch at every step."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coupler.errors import CouplerError
from coupler.interfaces import Completion, Request
from coupler_engine_fsdp.rollout_columns import Columns, Prefill, Shape, cache_arguments
from coupler_engine_fsdp.rollout_sampling import cut, sample, stream_starts, uniforms
from coupler_engine_fsdp.rollout_step import step_of

MIN_GROWTH = 64
"""Least columns that the cache grows by."""
AHEAD = 16
"""Steps whose random numbers are computed together."""


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One request on its way."""

    request: Request
    max_tokens: int
    """The request's limit, or what the model's positions leave."""
    done: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Filled by :meth:`stamp`."""
    kept: list[np.ndarray] = field(default_factory=list)
    """The ids that each token was sampled among under ``top_k``, and -1 behind them."""
    is_stale: bool = False
    """Whether weights before an update computed what its cache begins with."""

    @property
    def known(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.tokens)

    @property
    def left(self) -> int:
        return self.max_tokens - len(self.tokens)

    def stamp(self, version: int) -> None:
        """Note which weights sampled the tokens since the last stamp."""
        self.versions += [version] * (len(self.tokens) - len(self.versions))

    def finish(self, reason: Literal["stop", "length", "abort"]) -> None:
        mask = np.stack(self.kept) if self.kept else None

        # A cancelled caller's future is done.
        if not self.done.done():
            self.done.set_result(
                Completion(
                    tuple(self.tokens),
                    tuple(self.logprobs),
                    tuple(self.versions),
                    reason,
                    sampling_mask=mask,
                )
            )


class Decoder:
    """The running batch. Every call blocks until it is computed, and calls never
    overlap.

    A row enters with all its tokens but the last one cached, and feeds that one in its
    first step. A step is therefore the only place where anything is sampled. Rows of
    one prompt differ in nothing but their stream of random numbers, so that they take
    that step together.

    transformers' own continuous batching (``generate_batch``, 5.17) is not used. For a
    small model on a CPU it takes longer than ``generate``, which takes longer than this
    loop.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: Shape,
        max_rows: int,
        max_cached_tokens: int,
        max_prefill_tokens: int,
    ) -> None:
        self.model, self.shape, self.forward = model, shape, step_of(model)
        self.max_rows, self.max_cached_tokens = max_rows, max_cached_tokens
        self.max_prefill_tokens = max_prefill_tokens
        self.clear()

    def clear(self) -> None:
        """Forget every row and free the cache."""
        self.rows: list[LiveSequence] = []
        self.columns = Columns(self.shape)
        device = self.shape.device
        # The tokens that the next step feeds, and their positions.
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        # The first row that joins, and which row of the cache each of them has.
        self.shared: tuple[int, list[int]] | None = None
        # PyTorch takes a tensor sooner than a number of Python's.
        self.one = torch.tensor(1, device=device)

        # The temperature is 1 for greedy rows.
        self.temperatures = torch.ones((0, 1), device=device)
        self.greedy: list[bool] = []
        self.streams = np.zeros(0, np.uint64)
        self.drawn = np.zeros(0, np.uint64)
        self.uniforms = np.zeros((0, 0))  # [steps to come, rows]

    def evict(self) -> list[LiveSequence]:
        """Take every row out.

        Admitted again, a row continues after its last token, on whatever weights there
        are then.
        """
        rows = self.rows
        for row in rows:
            row.is_stale = False
        self.clear()
        return rows

    @torch.inference_mode()
    def admit(self, waiting: list[LiveSequence]) -> None:
        """Move rows from the front of ``waiting`` into the batch, as many as fit.

        Each distinct prefix is computed once. Where that fails, the rows wait again, so
        that whoever ends the batch finds them.
        """
        joining = self._take(waiting) if waiting else []
        if not joining:
            return
        try:
            self._join(joining)
        except BaseException:
            waiting[:0] = joining
            raise

    def _join(self, joining: list[LiveSequence]) -> None:
        groups: dict[tuple[int, ...], list[LiveSequence]] = {}
        for row in joining:
            groups.setdefault(row.known, []).append(row)
        self.columns.reserve(len(joining), max(map(len, groups)) - 1, self._growth(joining))

        fresh = ((index, row) for index, row in enumerate(self.rows) if not row.is_stale)
        siblings = {row.request.prompt: index for index, row in fresh}
        new: list[list[LiveSequence]] = []
        for known in groups.keys() & siblings.keys():
            self.columns.join(self.columns.past(siblings[known], len(known) - 1))
            new.append(groups.pop(known))

        for chunk in self._chunks(sorted(groups, key=len)):
            past = self._prefill(chunk)
            for index, known in enumerate(chunk):
                self.columns.join(past[:, :, index, :, : len(known) - 1])
                new.append(groups[known])

        self._append(new)

    def _take(self, waiting: list[LiveSequence]) -> list[LiveSequence]:
        """Remove the rows that fit from ``waiting``. One row always fits."""
        waiting[:] = [row for row in waiting if not row.done.done()]
        longest = max((len(row.request.prompt) + row.max_tokens for row in self.rows), default=0)
        count = 0
        for row in waiting[: self.max_rows - len(self.rows)]:
            longest = max(longest, len(row.request.prompt) + row.max_tokens)
            rows = len(self.rows) + count + 1
            if rows > 1 and rows * longest > self.max_cached_tokens:
                break
            count += 1

        taken = waiting[:count]
        del waiting[:count]
        return taken

    def _growth(self, joining: list[LiveSequence]) -> int:
        """Return how many columns to add when the cache must grow.

        It is enough to finish, or to double the cache, since most rows may stop early.
        """
        left = max(row.left for row in (*self.rows, *joining))
        return min(left, max(MIN_GROWTH, self.columns.width))

    def _chunks(self, prefixes: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """Split prefixes into chunks of at most ``max_prefill_tokens``, padding
        included.

        The prefixes are sorted by length.
        """
        chunks: list[list[tuple[int, ...]]] = []
        for prefix in prefixes:
            if not chunks or (len(chunks[-1]) + 1) * len(prefix) > self.max_prefill_tokens:
                chunks.append([])
            chunks[-1].append(prefix)
        return chunks

    def _prefill(self, prefixes: list[tuple[int, ...]]) -> Tensor:
        """Compute keys and values of all but the last token.

        [layers, 2, prefixes, heads, width, dim]. Padding is on the right, where causal
        attention never looks.
        """
        width = max(map(len, prefixes)) - 1
        cache = Prefill(self.shape, len(prefixes), width)
        if width:
            padded = [prefix[:-1] + (0,) * (width + 1 - len(prefix)) for prefix in prefixes]
            ids = torch.tensor(padded, device=self.shape.device)
            positions = torch.arange(width, device=self.shape.device)[None].expand_as(ids)
            base = self.model.base_model
            base(input_ids=ids, position_ids=positions, **cache_arguments(base, cache))
        return cache.store

    def _append(self, groups: list[list[LiveSequence]]) -> None:
        """Add rows.

        Those of a group have one row of the cache until their first step, whose result
        is the same for all.
        """
        device, new = self.shape.device, [row for group in groups for row in group]
        tokens = torch.tensor([group[0].known[-1] for group in groups], device=device)
        positions = torch.tensor([len(group[0].known) - 1 for group in groups], device=device)
        temperatures = [[row.request.temperature or 1.0] for row in new]

        first = len(self.rows)
        self.shared = (first, [first + index for index, group in enumerate(groups) for _ in group])

        self.rows += new
        self.tokens = torch.cat([self.tokens, tokens])
        self.positions = torch.cat([self.positions, positions])
        self.temperatures = torch.cat(
            [self.temperatures, torch.tensor(temperatures, device=device)]
        )
        self.greedy += [row.request.temperature == 0 for row in new]
        starts = stream_starts([row.request.seed for row in new])
        self.streams = np.concatenate([self.streams, starts])
        drawn = np.array([len(row.tokens) for row in new], np.uint64)
        self.drawn = np.concatenate([self.drawn, drawn])
        self.uniforms = np.zeros((0, len(self.rows)))

    @torch.inference_mode()
    def step(self) -> list[tuple[LiveSequence, Literal["stop", "length"]]]:
        """Sample one token for every row.

        Rows that are done leave the batch and are returned. Rows that nobody waits for
        leave it too.

        Raises:
            CouplerError: a log-probability is not a number.
        """
        if self.columns.end == self.columns.capacity:
            self.columns.reserve(0, 0, self._growth([]))
        logits = self.forward(self.tokens, self.positions, self.columns).float()
        self.columns.end += 1
        self.positions.add_(self.one)
        if self.shared:
            logits = self._separate(logits, *self.shared)

        tokens, logprobs = self._sample(logits)
        self.tokens = tokens
        self.drawn += np.uint64(1)

        # This is the only wait for the device.
        sampled, values = tokens.tolist(), logprobs.tolist()

        if not math.isfinite(sum(values)):
            raise CouplerError(
                "the rollout's weights give log-probabilities that are not finite.\n"
                "  likely:  training diverged, or the weights were never received: only an "
                "update brings real ones"
            )

        finished: list[tuple[LiveSequence, Literal["stop", "length"]]] = []
        keep: list[int] = []
        for index, (row, token, value) in enumerate(zip(self.rows, sampled, values, strict=True)):
            row.tokens.append(token)
            row.logprobs.append(value)
            if token in row.request.stop:
                finished.append((row, "stop"))
            elif len(row.tokens) == row.max_tokens:
                finished.append((row, "length"))
            elif not row.done.done():
                keep.append(index)
        if len(keep) < len(self.rows):
            self._keep(keep)
        return finished

    def _separate(self, logits: Tensor, first: int, sources: list[int]) -> Tensor:
        """Give each row from ``first`` on its own row of the cache.

        Returns:
            The logits of all rows, [rows, V].
        """
        self.shared = None
        if len(sources) > len(logits) - first:
            self.columns.spread(first, sources)
            index = torch.tensor([*range(first), *sources], device=logits.device)
            logits, self.positions = logits[index], self.positions[index]
        return logits

    def _sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and their log-probabilities, each [rows]."""
        logprobs = torch.log_softmax(logits / self.temperatures, -1)
        self._cut(logprobs)

        if all(self.greedy):
            tokens = logprobs.argmax(-1)
        else:
            tokens = sample(logprobs, torch.from_numpy(self._next_uniforms()).to(logits.device))
            if any(self.greedy):
                tokens = torch.where(
                    torch.tensor(self.greedy, device=logits.device), logprobs.argmax(-1), tokens
                )
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def _cut(self, logprobs: Tensor) -> None:
        """Leave to each row [V] what its request's ``top_k`` and ``top_p`` do.

        Rows note what is left under ``top_k``.
        """
        requests = [row.request for row in self.rows]
        chosen = [i for i, request in enumerate(requests) if request.top_k or request.top_p < 1]
        if not chosen:
            return

        vocabulary, device = logprobs.shape[1], logprobs.device
        top_k = [min(requests[i].top_k or vocabulary, vocabulary) for i in chosen]
        top_p = [requests[i].top_p if requests[i].top_p < 1 else math.inf for i in chosen]
        logprobs[chosen], ids = cut(
            logprobs[chosen],
            torch.tensor(top_k, device=device)[:, None],
            torch.tensor(top_p, dtype=torch.float64, device=device)[:, None],
        )

        noting = [at for at, i in enumerate(chosen) if requests[i].top_k]
        if not noting:
            return
        for at, kept in zip(noting, ids[noting].int().cpu().numpy(), strict=True):
            self.rows[chosen[at]].kept.append(kept[: top_k[at]].copy())

    def _next_uniforms(self) -> np.ndarray:
        """Return the next uniform number of each row, [rows].

        Computed one step at a time, they would take much of a small model's step.
        """
        if not len(self.uniforms):
            self.uniforms = uniforms(
                self.streams, self.drawn + np.arange(AHEAD, dtype=np.uint64)[:, None]
            )
        first, self.uniforms = self.uniforms[0], self.uniforms[1:]
        return first

    def _keep(self, keep: list[int]) -> None:
        """Keep these rows.

        The last ones move into the holes, so that few caches are copied.
        """
        order, sources = list(range(len(keep))), [index for index in keep if index >= len(keep)]
        holes = sorted(set(order) - set(keep))
        for hole, source in zip(holes, sources, strict=True):
            order[hole] = source
        self.columns.move(sources, holes, len(keep))

        self.rows = [self.rows[index] for index in order]
        index = torch.tensor(order, dtype=torch.int64, device=self.shape.device)
        self.tokens, self.positions, self.temperatures = (
            each[index] for each in (self.tokens, self.positions, self.temperatures)
        )
        self.greedy = [self.greedy[i] for i in order]
        self.streams, self.drawn, self.uniforms = (
            self.streams[order],
            self.drawn[order],
            self.uniforms[:, order],
        )
