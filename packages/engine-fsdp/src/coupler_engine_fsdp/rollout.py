"""Implement ``rollout=hf``: inference with a transformers model in this process.

It runs on the event loop that calls it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from coupler.errors import CouplerError
from coupler.interfaces import (
    Completion,
    InFlight,
    Memory,
    Model,
    Rank,
    Request,
    Rollout,
    SyncReceipt,
    WeightUpdate,
)
from coupler_engine_fsdp.decoding import Decoder, LiveSequence
from coupler_engine_fsdp.rollout_model import (
    allocate_weights,
    build,
    cache_shape,
    free_weights,
    load_folder,
    load_named,
    shapes_of,
)

DUMMY = -1
"""Version of the random weights that the rollout starts with."""
OWN = 0
"""Version of the weights of the model's own folder, which never change."""


class HFRollout(Rollout):
    """One replica. It owns a copy of the weights and starts no thread.

    Calls of :meth:`generate` are batched continuously: one task decodes a token for
    every running sequence and then yields to the event loop. Other tasks, such as
    rewards and new requests, run between two steps.
    """

    def __init__(self, config: Any, model: Model) -> None:
        super().__init__(config, model)
        self.version = DUMMY
        self.waiting: list[LiveSequence] = []
        self.torn = False  # An update began and did not end.
        self.paused: InFlight | None = None
        self.asleep: frozenset[Memory] = frozenset()
        # The storages of sleeping parameters, with their sizes.
        self.freed: list[tuple[torch.UntypedStorage, int]] = []
        self.task: asyncio.Task[None] | None = None

    async def setup(self, rank: Rank) -> int:
        """Build the model with random weights, or with its own where they are asked
        for. A replica has one worker.

        Raises:
            CouplerError: this model family cannot run here, or its folder lacks
                weights.
        """
        self.rank, self.torn = rank, False
        self.hf = build(self.model, self.config.dtype, rank)
        if self.model.own_weights:
            load_folder(self.hf, Path(self.model.path))
            self.version = OWN
        self.max_positions: int = self.hf.config.get_text_config().max_position_embeddings
        self.vocabulary: int = self.hf.config.get_text_config().vocab_size

        shape = cache_shape(self.hf)
        cached_tokens = int(self.config.kv_cache_gib * 2**30 / shape.bytes_per_token)
        self.decoder = Decoder(
            self.hf, shape, self.config.max_sequences, cached_tokens, self.config.max_prefill_tokens
        )
        return 1

    async def generate(self, request: Request) -> Completion:
        """Sample one completion.

        It ends with ``length`` when the model has no positions left.

        Raises:
            CouplerError: the request is malformed, or the rollout's memory sleeps.
        """
        room = request.room(self.max_positions, self.vocabulary)
        if self.paused is None:
            self._check_awake("generate()", frozenset(Memory))
        row = LiveSequence(request, room, asyncio.get_running_loop().create_future())
        self.waiting.append(row)
        self._run()
        return await row.done

    def _check_awake(
        self, call: str, needed: frozenset[Memory] = frozenset({Memory.WEIGHTS})
    ) -> None:
        if self.torn and call != "update()":
            raise CouplerError(
                "the last weight update was refused or failed, so that some weights are new and "
                "some old.\n  push:  all weights again"
            )
        if asleep := sorted(self.asleep & needed):
            raise CouplerError(
                f"the rollout's {' and '.join(asleep)} sleep.\n  call:  wake() before {call}"
            )

    def _run(self) -> None:
        """Make sure that waiting and running sequences are worked on."""
        if self._busy() and (self.task is None or self.task.done()):
            self.task = asyncio.get_running_loop().create_task(self._decode())
            self.task.add_done_callback(self._ended)

    def _busy(self) -> bool:
        if self.paused is None:
            return bool(self.waiting or self.decoder.rows)
        return self.paused is InFlight.DRAIN and bool(self.decoder.rows)

    async def _decode(self) -> None:
        while self._busy():
            # This comes first, so that calls made together start together.
            await asyncio.sleep(0)
            if self.paused is None:
                self.decoder.admit(self.waiting)
            if self._busy() and self.decoder.rows:
                for row, reason in self.decoder.step():
                    row.stamp(self.version)
                    row.finish(reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Bring a failure of the decoding to every caller, and drop its batch."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        lost = self.decoder.evict() + self.waiting
        self.waiting = []
        for row in lost:
            if not row.done.done():
                row.done.set_exception(error)

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        """Load the weights.

        Running sequences continue on them after their cache is recomputed. Under
        ``stale_kv`` they continue with their cache.

        Raises:
            WeightSyncError: a tensor has another shape than its parameter.
            CouplerError: the weights sleep.
        """
        self._check_awake("update()")
        for row in self.decoder.rows:
            row.stamp(self.version)
            row.is_stale = True
        if self.paused is not InFlight.STALE_KV:
            self._requeue()
        self.torn = True
        receipt = load_named(self.hf, update.receive(self.rank, shapes_of(self.hf)), update.version)
        self.torn, self.version = False, update.version
        return receipt

    def _requeue(self) -> None:
        rows = self.decoder.evict()
        for row in rows:
            row.stamp(self.version)
        self.waiting = rows + self.waiting

    async def pause(self, in_flight: InFlight) -> None:
        """Stop sampling.

        Running sequences go on to their end (``drain``), return the tokens they have
        (``abort``), keep only their tokens (``recompute``), or keep their cache too
        (``stale_kv``). Sequences that had not started wait for :meth:`resume`.
        """
        self.paused = in_flight
        if in_flight is InFlight.ABORT:
            self._requeue()
            started = [row for row in self.waiting if row.tokens]
            self.waiting = [row for row in self.waiting if not row.tokens]
            for row in started:
                row.finish("abort")
        elif in_flight is InFlight.RECOMPUTE:
            self._requeue()

        self._run()
        while self._busy():
            await asyncio.sleep(0)

    async def resume(self) -> None:
        self._check_awake("resume()")
        self.paused = None
        self._run()

    async def sleep(self, what: frozenset[Memory]) -> None:
        """Free weights, caches or both. Paused sequences keep their tokens.

        Raises:
            CouplerError: requests are being sampled.
        """
        running = len(self.decoder.rows) + len(self.waiting)
        if running and self.paused is None:
            raise CouplerError(
                f"{running} requests are being sampled.\n  call:  pause() before sleep()"
            )

        self._requeue()
        self.asleep |= what
        if Memory.WEIGHTS in what and not self.freed:
            self.freed = free_weights(self.hf)
        if self.decoder.shape.device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self, what: frozenset[Memory]) -> None:
        self.asleep -= what
        if Memory.WEIGHTS in what:
            allocate_weights(self.freed)
            self.freed = []
