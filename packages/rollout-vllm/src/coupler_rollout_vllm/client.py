"""Send requests straight to an engine's scheduler, in the rollout's process.

vLLM's front end handles every token on its own. It also clones and checks each request,
which we have made and checked ourselves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import numpy as np

from coupler.batch.batch import concat
from coupler_rollout_vllm.compat import engine as vllm


@dataclass(slots=True)
class Running:
    """One request in the engine: what it has sampled, and where the weights changed."""

    ended: asyncio.Future[str]
    """Set to the reason when the request ends."""
    versions: list[tuple[int, int]]
    """Pairs of a number of tokens and the version that samples from there on."""
    routers: list[int] = field(default_factory=list)
    """The layers with a router."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    """Pieces of [fed, every layer, topk], where routes are recorded."""
    masked: bool = False
    """Whether to keep the ids that tokens were sampled among."""
    masks: list[np.ndarray] = field(default_factory=list)
    """Pieces of [tokens, kept] of these."""

    def take(self, output: Any) -> None:
        """Append what the scheduler sent."""
        self.tokens += output.new_token_ids
        self.logprobs += vllm.logprobs_of(output)
        if output.routed_experts is not None:
            self.routes.append(output.routed_experts)
        if self.masked and output.new_token_ids:
            self.masks.append(vllm.kept_of(output))
        if output.finish_reason is not None and not self.ended.done():
            self.ended.set_result(str(output.finish_reason))

    def each_route(self) -> np.ndarray | None:
        """Return the experts of each token that was fed, [fed, layers, topk]."""
        return np.concatenate(self.routes)[:, self.routers] if self.routes else None

    def each_mask(self) -> np.ndarray | None:
        """Return the ids that each token was sampled among, [tokens, kept]."""
        if not self.masks:
            return None
        ids = concat(self.masks)
        return ids[:, : int((ids >= 0).sum(1).max())]

    def each_version(self) -> list[int]:
        """Return the version that sampled each token, [tokens]."""
        ends = [start for start, _ in self.versions[1:]] + [len(self.tokens)]
        stretches = zip(self.versions, ends, strict=True)
        return list(
            chain.from_iterable(repeat(version, end - start) for (start, version), end in stretches)
        )


class Client:
    """Know what runs in an engine. One event loop owns the client."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.running: dict[str, Running] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        vllm.hand_over_outputs(engine, asyncio.create_task(self._receive()))

    async def run(
        self,
        name: str,
        tokens: list[int],
        params: Any,
        salt: str,
        version: int,
        *,
        adapted: bool,
        routers: list[int],
        masked: bool,
    ) -> tuple[Running, str]:
        """Run one request until it ends or is cut off.

        Args:
            adapted: run it with the engine's adapter.
            routers: the layers with a router.
            masked: keep the ids that tokens are sampled among.

        Returns:
            The request with what it sampled, and the reason why it ended.

        Raises:
            EngineDead: the engine's process ended.
        """
        request = self.running[name] = Running(
            asyncio.get_running_loop().create_future(), [(0, version)], routers, masked=masked
        )
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
        """End every running request with what it has sampled so far."""
        await vllm.freeze(self.engine)
        await vllm.send_abort(self.engine, list(self.running))

        for request in self.running.values():
            if not request.ended.done():
                request.ended.set_result("abort")
        await self.engine.resume_generation()

    def lose(self, error: BaseException) -> None:
        """Fail every running request, whose answer cannot come any more."""
        for request in self.running.values():
            if not request.ended.done():
                request.ended.set_exception(error)

    async def _receive(self) -> None:
        dead = vllm.engine_dead()

        while True:
            try:
                for output in await vllm.next_outputs(self.engine):
                    if output.request_id in self.running:
                        self.running[output.request_id].take(output)
            # An answer that cannot be read takes those behind it along.
            except Exception as error:
                self.lose(error)
                if isinstance(error, dead):
                    return
