"""Implement ``rollout=vllm`` in the process of one replica, which starts vLLM.

vLLM's scheduler and model workers are processes of their own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any
from weakref import finalize

import numpy as np

from coupler import errors
from coupler.engine_kit import resident_bytes
from coupler.errors import CouplerError, ReplicaDied, WeightSyncError
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
from coupler_rollout_vllm.arguments import engine_arguments
from coupler_rollout_vllm.client import Client, Running
from coupler_rollout_vllm.compat import engine as vllm
from coupler_rollout_vllm.compat.version import prepare
from coupler_rollout_vllm.config import bad_temperature
from coupler_rollout_vllm.receipts import join

DUMMY = -1
"""Version of the random weights that the rollout starts with."""
ENDS_S = 10.0
"""Seconds within which an engine ends after its worker died."""
ALIVE_S = 1.0
"""Seconds between two looks at whether the engine lives, during a control call."""


@dataclass(slots=True)
class Sampled:
    """The tokens of a request so far, over all its stays in the engine."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: np.ndarray | None = None
    """[tokens fed, layers with a router, topk]"""

    def add(self, stay: Running, routers: list[int]) -> None:
        """Append one more stay, which was fed all earlier tokens."""
        self.tokens += stay.tokens
        self.logprobs += stay.logprobs
        self.versions += stay.each_version()
        if stay.routes:
            routes = np.concatenate(stay.routes)[:, routers].astype(np.int16)
            # Earlier tokens keep the routes that sampled them.
            if self.routes is not None:
                routes[: len(self.routes)] = self.routes
            self.routes = routes

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
            tuple(self.tokens), tuple(self.logprobs), tuple(self.versions), finish, routes
        )


class VLLMRollout(Rollout):
    """One replica.

    Requests pass our own gate before they enter the engine, so that a pause means the
    same in every release. While paused, no request enters. Those that run are treated
    as the mode says:

    - drain: they run to their end.
    - abort: they are cut off.
    - recompute: they are cut off, and enter again after the update with their tokens as
      part of the prompt.
    - stale_kv: they are frozen with their cache.
    """

    def __init__(self, config: Any, model: Model) -> None:
        """Prepare this process for vLLM, which :meth:`setup` starts.

        Raises:
            PluginError: vLLM is not installed, or outside the tested range.
        """
        super().__init__(config, model)
        prepare()

        self.version, self.updates = DUMMY, 0
        # Whether the real weights have come, and whether an adapter lies on them.
        self.based, self.adapted = False, False
        self.asleep: frozenset[Memory] = frozenset()
        self.paused: InFlight | None = None
        self.names = count()
        self.gate = asyncio.Event()
        self.gate.set()
        self.engine: Any = None
        self.end: Callable[[], object] | None = None
        self.watch: asyncio.Task[None] | None = None

    async def setup(self, rank: Rank) -> int:
        """Start the engine with random weights. An engine that died is started again.

        Raises:
            CouplerError: vLLM did not start; its own log lines say why.
        """
        self.close()
        self.rank, self.version, self.asleep = rank, DUMMY, frozenset()
        self.torn = False
        self.based, self.adapted = False, False

        self.engine = vllm.start(engine_arguments(self.config, self.model, rank))
        # The engine ends with this process at the latest.
        self.end = finalize(self, vllm.stop, self.engine)
        self.client = Client(self.engine)
        self.workers: list[dict[str, Any]] = await self._workers("coupler_facts")
        self.max_tokens: int = self.engine.model_config.max_model_len
        self.vocabulary: int = self.engine.model_config.get_vocab_size()

        gc.collect()
        # Without the freeze, a collection amid thousands of requests walks through all
        # that vLLM imports.
        gc.freeze()
        return len(self.workers)

    async def generate(self, request: Request) -> Completion:
        """Sample one completion.

        It ends with ``length`` when the model has no positions left.

        Raises:
            CouplerError: the request is malformed, or the rollout's memory sleeps.
            ReplicaDied: the engine's process ended.
        """
        if problem := bad_temperature("sampling.temperature", request.temperature):
            raise CouplerError(problem)

        room = request.room(self.max_tokens, self.vocabulary)
        done = Sampled()
        while True:
            while not self.gate.is_set():
                await self.gate.wait()
            finish = await self._stay(request, done, room)
            if finish != "abort" or self.paused is not InFlight.RECOMPUTE:
                return done.completion(request, finish)

    async def _stay(self, request: Request, done: Sampled, room: int) -> Any:
        """Run a request in the engine until it ends or is cut off.

        What it samples is added to ``done``.
        """
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
        params = vllm.sampling_params(
            request, len(done.tokens), room, self.config.per_request_seeds
        )
        prompt = [*request.prompt, *done.tokens]

        if self.watch is None:
            self.watch = asyncio.create_task(self._watch())
        try:
            stay, finish = await self.client.run(
                f"coupler-{next(self.names)}",
                prompt,
                params,
                salt=str(self.updates),
                version=self.version,
                adapted=self.adapted,
            )
        except vllm.engine_dead() as error:
            raise self._died() from error

        done.add(stay, self.workers[0]["routers"])
        return finish

    @property
    def running(self) -> dict[str, Running]:
        """Requests in the engine, by name."""
        return self.client.running

    # --- weights

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        """Load the weights inside every model worker, in one call.

        Caches of older weights are never read again.

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
        receipts = await self._workers("coupler_update", json.dumps(asdict(update)))

        self.torn, self.based, self.adapted = False, True, update.adapter
        self.version = update.version
        # The count is part of every key of the prefix cache.
        self.updates += 1
        for running in self.running.values():
            running.versions.append((len(running.tokens), self.version))
        return join(update.version, receipts)

    async def holds_base(self) -> bool:
        return self.based

    async def checksums(self) -> list[dict[str, int]]:
        """Return the checksums of the weights in each model worker, without an adapter.

        See :func:`~coupler_rollout_vllm.worker.checksums.of_plan`.
        """
        return await self._workers("coupler_checksums")

    # --- pausing

    async def pause(self, in_flight: InFlight) -> None:
        """Close the gate, and treat running requests as ``in_flight`` says.

        Raises:
            ReplicaDied: the engine's process ended, perhaps while it was idle.
        """
        self.gate.clear()
        self.paused = in_flight
        if in_flight is InFlight.STALE_KV:
            await self._alive(vllm.freeze(self.engine))
        elif self.running:
            if in_flight is not InFlight.DRAIN:
                await self._alive(self.client.cut_off())
            await self._alive(self.client.idle.wait())
        await self._alive(self.engine.check_health())

    async def resume(self) -> None:
        if self.paused is InFlight.STALE_KV:
            await self._alive(self.engine.resume_generation())
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
        await self._workers("coupler_sleep", sorted(what - self.asleep))
        self.asleep |= what

    async def wake(self, what: frozenset[Memory]) -> None:
        await self._workers("coupler_wake", sorted(what & self.asleep))
        self.asleep -= what
        # A new count, since the cache lost what it held.
        self.updates += 1

    async def device_bytes(self) -> int:
        return max(await self._workers("coupler_device_bytes"))

    async def host_bytes(self) -> int:
        return sum(map(resident_bytes, {os.getpid(), *(worker["pid"] for worker in self.workers)}))

    # --- the engine's process

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension in every model worker, once.

        See :class:`~coupler_rollout_vllm.worker.extension.WorkerExtension`.
        """
        answers = await self._alive(self.engine.collective_rpc(method, args=args))
        for answer in answers:
            if isinstance(answer, dict) and "error" in answer:
                kind, text = answer["error"]
                raise {**vars(errors), "MemoryError": MemoryError}[kind](text)
        return answers

    async def _alive(self, call: Awaitable[Any]) -> Any:
        """Wait for a call to the engine for as long as the engine's process lives."""
        task = asyncio.ensure_future(call)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=ALIVE_S)
                if done:
                    return task.result()
                await self.engine.check_health()
        except vllm.engine_dead() as error:
            raise self._died() from error
        # vLLM raises its own errors for a failed call. If a worker died, the call fails
        # first, and the engine ends afterwards.
        except Exception as error:
            if await self._ends():
                raise self._died() from error
            raise
        finally:
            task.cancel()

    async def _ends(self) -> bool:
        """Return True if the engine's process ends within :data:`ENDS_S`."""
        deadline = time.monotonic() + ENDS_S
        while time.monotonic() < deadline:
            try:
                await self.engine.check_health()
            except vllm.engine_dead():
                return True
            await asyncio.sleep(0.1)
        return False

    async def _watch(self) -> None:
        """Fail waiting requests if the engine is dead and nothing else shows it."""
        while self.running:
            await asyncio.sleep(ALIVE_S)
            try:
                await self.engine.check_health()
            except vllm.engine_dead() as error:
                self.client.lose(error)
                break
        self.watch = None

    def _died(self) -> ReplicaDied:
        return ReplicaDied(
            f"the vLLM engine of rollout replica {self.rank.index} died.\n"
            "  look at:  its last lines above, or the log of this replica; out of memory, "
            "most often"
        )

    def close(self) -> None:
        """End the engine's processes."""
        if self.end is not None:
            self.end()
