"""Send requests to an engine's scheduler, in the rollout's process, past vLLM's front end.

That front end handles every token on its own, and clones and checks each request that we
have made and checked ourselves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import numpy as np

from coupler_rollout_vllm.compat import engine as vllm


@dataclass(slots=True)
class Running:
    """One request in the engine: what has arrived of it, and where the weights changed under it."""

    ended: asyncio.Future[str]  # how
    versions: list[tuple[int, int]]  # (tokens sampled before, version from there on)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # [fed, every layer, topk] in pieces, where recorded

    def take(self, output: Any) -> None:
        """Append what the scheduler sent."""
        self.tokens += output.new_token_ids
        self.logprobs += vllm.logprobs_of(output)
        if output.routed_experts is not None:
            self.routes.append(output.routed_experts)
        if output.finish_reason is not None and not self.ended.done():
            self.ended.set_result(str(output.finish_reason))

    def each_version(self) -> list[int]:
        """[tokens] the version that sampled each."""
        ends = [start for start, _ in self.versions[1:]] + [len(self.tokens)]
        stretches = zip(self.versions, ends, strict=True)
        return list(chain.from_iterable(repeat(version, end - start) for (start, version), end in stretches))


class Client:
    """Knows what runs in an engine; one event loop's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.running: dict[str, Running] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        vllm.hand_over_outputs(engine, asyncio.create_task(self._receive()))

    async def run(
        self, name: str, tokens: list[int], params: Any, salt: str, version: int, *, adapted: bool
    ) -> tuple[Running, str]:
        """Run one request, with the engine's adapter or without, until it ends or is cut off; return it, and how.

        Raises:
            EngineDead: the engine's process ended.
        """
        request = self.running[name] = Running(asyncio.get_running_loop().create_future(), [(0, version)])
        self.idle.clear()
        try:
            await vllm.send_request(self.engine, name, tokens, params, salt, adapted=adapted)
            return request, await request.ended
        except asyncio.CancelledError:
            await vllm.send_abort(self.engine, [name])
            raise
        finally:
            del self.running[name]
            if not self.running:
                self.idle.set()

    async def cut_off(self) -> None:
        """End all that runs, with what it has by now."""
        await vllm.freeze(self.engine)
        await vllm.send_abort(self.engine, list(self.running))
        for request in self.running.values():
            if not request.ended.done():
                request.ended.set_result("abort")
        await self.engine.resume_generation()

    def lose(self, error: BaseException) -> None:
        """The engine died: nothing that runs will end."""
        for request in self.running.values():
            if not request.ended.done():
                request.ended.set_exception(error)

    async def _receive(self) -> None:
        try:
            while True:
                for output in await vllm.next_outputs(self.engine):
                    if output.request_id in self.running:
                        self.running[output.request_id].take(output)
        except vllm.engine_dead() as error:
            self.lose(error)
