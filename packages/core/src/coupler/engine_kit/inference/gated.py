"""Give every inference engine the same meaning of a pause, an update and a sleep."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from coupler.batch.batch import concat
from coupler.engine_kit.inference.receipts import join
from coupler.errors import CouplerError, WeightSyncError
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

DUMMY = -1
"""Version of the random weights that a rollout starts with."""


class Stay(Protocol):
    """Hold what one stay of a request in the engine sampled."""

    tokens: list[int]
    logprobs: list[float]

    def each_version(self) -> list[int]:
        """Return the version that sampled each token, [tokens]."""
        ...

    def each_route(self) -> np.ndarray | None:
        """Return the experts of each token that was fed, [fed, layers, topk]."""
        ...

    def each_mask(self) -> np.ndarray | None:
        """Return the ids that each token was sampled among, [tokens, kept]."""
        ...


@dataclass(slots=True)
class Sampled:
    """The tokens of a request so far, over all its stays in the engine."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: np.ndarray | None = None
    """[tokens fed, layers with a router, topk]"""
    masks: list[np.ndarray] = field(default_factory=list)
    """Of each stay, the ids that tokens were sampled among, [tokens, kept]."""

    def add(self, stay: Stay) -> None:
        """Append one more stay, which was fed all earlier tokens."""
        self.tokens += stay.tokens
        self.logprobs += stay.logprobs
        self.versions += stay.each_version()

        mask = stay.each_mask()
        if mask is not None:
            self.masks.append(mask)

        routes = stay.each_route()
        if routes is not None:
            routes = routes.astype(np.int16)
            # Earlier tokens keep the routes that sampled them, and a stay that was cut
            # off before it was fed brings none.
            if self.routes is not None:
                routes = np.concatenate([self.routes, routes[len(self.routes) :]])
            self.routes = routes

    def ended(self, request: Request, room: int) -> str:
        """Return the finish that the tokens show, or "" if they may go on.

        Engines differ about a stop token in the last free place, and about a cut behind
        the last token.
        """
        if self.tokens and self.tokens[-1] in request.stop:
            return "stop"
        return "length" if len(self.tokens) >= room else ""

    def completion(self, request: Request, finish: Any) -> Completion:
        """Return the whole completion.

        The last token has no route (-1), since nothing was sampled after it.
        """
        routes = None
        if request.routed_experts and self.routes is not None:
            length = len(request.prompt) + len(self.tokens)
            routes = np.full((length, *self.routes.shape[1:]), -1, np.int16)
            routes[: len(self.routes)] = self.routes

        return Completion(
            tuple(self.tokens),
            tuple(self.logprobs),
            tuple(self.versions),
            finish,
            routes,
            concat(self.masks) if request.top_k and self.masks else None,
        )


class GatedRollout(Rollout):
    """One replica of an engine behind a gate of ours.

    Requests pass the gate before they enter the engine, so that a pause means the same
    for every engine and release. While paused, no request enters. Those that run are
    treated as the mode says:

    - drain: they run to their end.
    - abort: they are cut off.
    - recompute: they are cut off, and enter again after the update with their tokens as
      part of the prompt.
    - stale_kv: they are frozen with their cache.
    """

    max_tokens: int
    """Tokens of a prompt with its completion, at most."""
    vocabulary: int

    def __init__(self, config: Any, model: Model) -> None:
        super().__init__(config, model)
        self.gate = asyncio.Event()
        self.gate.set()
        self.updates = 0
        self.paused: InFlight | None = None
        self._forget()

    def begin(self, rank: Rank) -> None:
        """Forget what an engine before held. :meth:`setup` calls it."""
        self.rank = rank
        self._forget()

    def _forget(self) -> None:
        self.version = DUMMY
        self.asleep: frozenset[Memory] = frozenset()
        # Whether an update broke off, so that some weights are new and some old.
        self.torn = False
        # Whether the real weights have come, and whether an adapter lies on them.
        self.based, self.adapted = False, False

    # --- what an engine brings

    @property
    @abstractmethod
    def running(self) -> Mapping[str, Any]:
        """Requests in the engine, by name."""

    @abstractmethod
    def check(self, request: Request) -> None:
        """Refuse a request that this engine would sample in another way.

        Raises:
            CouplerError: it would.
        """

    @abstractmethod
    async def stay(self, request: Request, done: Sampled, room: int) -> tuple[Stay, str]:
        """Run a request in the engine until it ends or is cut off.

        Args:
            done: the tokens of its earlier stays, which follow the prompt.
            room: tokens that may be sampled, with those of ``done``.

        Returns:
            What this stay sampled, and the reason why it ended.

        Raises:
            ReplicaDied: the engine ended.
        """

    @abstractmethod
    async def freeze(self) -> None:
        """Stop between two tokens, with every request and cache kept."""

    @abstractmethod
    async def thaw(self) -> None:
        """Undo :meth:`freeze`."""

    @abstractmethod
    async def cut_off(self) -> None:
        """End every running request with what it has sampled so far."""

    @abstractmethod
    async def drained(self) -> None:
        """Wait until no request runs."""

    @abstractmethod
    async def check_alive(self) -> None:
        """Return if the engine lives.

        Raises:
            ReplicaDied: it does not, perhaps since a time when it was idle.
        """

    @abstractmethod
    async def load(self, update: WeightUpdate) -> list[dict[str, Any]]:
        """Load an update in every model worker, and return their answers.

        An answer is as :func:`~coupler.engine_kit.inference.receipts.join` reads it.
        """

    @abstractmethod
    async def release(self, parts: list[Memory]) -> None:
        """Give back the memory of these parts."""

    @abstractmethod
    async def restore(self, parts: list[Memory]) -> None:
        """Take back the memory of these parts."""

    # --- requests

    async def generate(self, request: Request) -> Completion:
        """Sample one completion.

        It ends with ``length`` when the model has no positions left.

        Raises:
            CouplerError: the request is malformed, or the rollout's memory sleeps.
            ReplicaDied: the engine's process ended.
        """
        self.check(request)
        room = request.room(self.max_tokens, self.vocabulary)
        done = Sampled()

        while True:
            while not self.gate.is_set():
                await self.gate.wait()
            self._check_weights()

            stay, finish = await self.stay(request, done, room)
            done.add(stay)
            finish = done.ended(request, room) or finish
            if finish != "abort" or self.paused is not InFlight.RECOMPUTE:
                return done.completion(request, finish)

    def _check_weights(self) -> None:
        if self.asleep:
            raise CouplerError(
                f"the rollout's {' and '.join(sorted(self.asleep))} sleep.\n  call:  wake() "
                "before generate()"
            )
        if self.torn:
            raise CouplerError(
                "the last weight update was refused or failed, so that some weights are new and "
                "some old.\n  push:  all weights again"
            )

    # --- weights

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        """Load the weights inside every model worker.

        Caches of older weights are never read again, if the engine puts
        :attr:`updates` into every key of them.

        Raises:
            WeightSyncError: requests run, the weights sleep, a tensor does not fit its
                parameter, or an adapter comes before the weights beneath it.
            ReplicaDied: the engine's process ended.
        """
        if self.running and self.paused is not InFlight.STALE_KV:
            raise WeightSyncError(
                f"{len(self.running)} requests are being sampled.\n  call:  pause() before update()"
            )
        if Memory.WEIGHTS in self.asleep:
            raise WeightSyncError("the rollout's weights sleep.\n  call:  wake() before update()")
        if update.adapter and not self.based:
            raise WeightSyncError(
                "an adapter came, and the weights beneath it did not.\n  push:  the weights first"
            )
        # If the update fails halfway, the base no longer counts as loaded.
        self.based = self.based and update.adapter
        self.torn = True
        answers = await self.load(update)

        self.torn, self.based, self.adapted = False, True, update.adapter
        self.version = update.version
        self.updates += 1
        return join(update.version, answers)

    async def holds_base(self) -> bool:
        return self.based

    # --- pausing

    async def pause(self, in_flight: InFlight) -> None:
        """Close the gate, and treat running requests as ``in_flight`` says.

        Raises:
            ReplicaDied: the engine's process ended, perhaps while it was idle.
        """
        self.gate.clear()
        self.paused = in_flight

        if in_flight is InFlight.STALE_KV:
            await self.freeze()
        elif self.running:
            if in_flight is not InFlight.DRAIN:
                await self.cut_off()
            await self.drained()
        await self.check_alive()

    async def resume(self) -> None:
        if self.paused is InFlight.STALE_KV:
            await self.thaw()
        self.paused = None
        self.gate.set()

    # --- memory

    async def sleep(self, what: frozenset[Memory]) -> None:
        """Give device memory back.

        On the CPU none is given back, and the same calls are refused.

        Raises:
            CouplerError: requests are being sampled.
        """
        if self.running:
            raise CouplerError(
                f"{len(self.running)} requests are being sampled.\n  call:  pause() before sleep()"
            )
        self.based = self.based and Memory.WEIGHTS not in what
        await self.release(sorted(what - self.asleep))
        self.asleep |= what

    async def wake(self, what: frozenset[Memory]) -> None:
        await self.restore(sorted(what & self.asleep))
        self.asleep -= what
        # A new count, since the cache lost what it held.
        self.updates += 1
