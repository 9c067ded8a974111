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
from dataclasses import asdict
from itertools import count
from typing import Any
from weakref import finalize

from coupler import errors
from coupler.engine_kit import resident_bytes
from coupler.engine_kit.inference.gated import GatedRollout, Sampled
from coupler.errors import CouplerError, ReplicaDied
from coupler.interfaces import Memory, Model, Rank, Request, WeightUpdate
from coupler_rollout_vllm.arguments import engine_arguments
from coupler_rollout_vllm.client import Client, Running
from coupler_rollout_vllm.compat import engine as vllm
from coupler_rollout_vllm.compat.version import prepare_process
from coupler_rollout_vllm.config import bad_temperature
from coupler_rollout_vllm.starting import Starting

ENDS_S = 10.0
"""Seconds within which an engine ends after its worker died."""
ALIVE_S = 1.0
"""Seconds between two looks at whether the engine lives, during a control call."""


class VLLMRollout(GatedRollout):
    """One replica of vLLM."""

    def __init__(self, config: Any, model: Model) -> None:
        """Prepare this process for vLLM, which :meth:`setup` starts.

        Raises:
            PluginError: vLLM is not installed, or outside the tested range.
        """
        super().__init__(config, model)
        prepare_process()
        vllm.import_engine()

        self.names = count()
        self.starting: Starting | None = None
        self.engine: Any = None
        self.end: Callable[[], object] | None = None
        self.watch: asyncio.Task[None] | None = None

    async def prepare(self, rank: Rank) -> None:
        """Start the engine, which waits before it takes a device."""
        self.close()
        self.starting = Starting(engine_arguments(self.config, self.model, rank))

    async def setup(self, rank: Rank) -> int:
        """Start the engine with random weights. An engine that died is started again.

        Raises:
            CouplerError: vLLM did not start; its own log lines say why.
        """
        if self.starting is None:
            await self.prepare(rank)
        self.begin(rank)

        assert self.starting
        starting, self.starting = self.starting, None
        self.engine = await starting.ready()
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

    # --- requests

    def check(self, request: Request) -> None:
        if problem := bad_temperature("sampling.temperature", request.temperature):
            raise CouplerError(problem)

    async def stay(self, request: Request, done: Sampled, room: int) -> tuple[Running, str]:
        width = self._mask_width(request)
        params = vllm.sampling_params(
            request, len(done.tokens), room, self.config.per_request_seeds, width
        )
        prompt = [*request.prompt, *done.tokens]

        if self.watch is None:
            self.watch = asyncio.create_task(self._watch())
        try:
            running, finish = await self.client.run(
                f"coupler-{next(self.names)}",
                prompt,
                params,
                salt=str(self.updates),
                version=self.version,
                adapted=self.adapted,
                routers=self.workers[0]["routers"],
                masked=width > 0,
            )
        except vllm.engine_dead() as error:
            raise self._died() from error

        mask = running.each_mask()
        if mask is not None and width < self.vocabulary and mask.shape[1] >= width:
            raise CouplerError(
                f"vLLM sampled among {width} ids or more with sampling.top_k={request.top_k}, "
                "since so many are equally likely.\n"
                "  try:  sampling.top_p below 1, or rollout.dtype=fp32"
            )
        return running, finish

    def _mask_width(self, request: Request) -> int:
        """Return how many log-probs show all ids that a token is sampled among.

        vLLM also keeps each id that is as likely as the last one of ``top_k``. Logits
        in half precision are often equal.
        """
        if not request.top_k or not request.temperature:
            return 0
        return min(2 * request.top_k + 16, self.vocabulary)

    @property
    def running(self) -> dict[str, Running]:
        """Requests in the engine, by name."""
        return self.client.running

    async def freeze(self) -> None:
        await self._alive(vllm.freeze(self.engine))

    async def thaw(self) -> None:
        await self._alive(self.engine.resume_generation())

    async def cut_off(self) -> None:
        await self._alive(self.client.cut_off())

    async def drained(self) -> None:
        await self._alive(self.client.idle.wait())

    async def check_alive(self) -> None:
        await self._alive(self.engine.check_health())

    # --- weights

    async def load(self, update: WeightUpdate) -> list[dict[str, Any]]:
        """Load the weights inside every model worker, in one call.

        Requests that are frozen go on with the new version.
        """
        answers = await self._workers("coupler_update", json.dumps(asdict(update)))
        for running in self.running.values():
            running.versions.append((len(running.tokens), update.version))
        return answers

    async def checksums(self) -> list[dict[str, int]]:
        """Return the checksums of the weights in each model worker, without an adapter.

        See :func:`~coupler.engine_kit.inference.checksums.of_plan`.
        """
        return await self._workers("coupler_checksums")

    # --- memory

    async def release(self, parts: list[Memory]) -> None:
        await self._workers("coupler_sleep", parts)

    async def restore(self, parts: list[Memory]) -> None:
        await self._workers("coupler_wake", parts)

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
        if self.starting is not None:
            self.starting.give_up()
            self.starting = None
        if self.end is not None:
            self.end()
