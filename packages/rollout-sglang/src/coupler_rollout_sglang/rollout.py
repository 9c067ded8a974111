"""Implement ``rollout=sglang`` in the process of one replica, which starts SGLang.

SGLang's processes are a tree of their own, see :mod:`coupler_rollout_sglang.host`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import finalize

from coupler import errors
from coupler.engine_kit import resident_bytes
from coupler.engine_kit.inference.gated import GatedRollout, Sampled
from coupler.errors import CouplerError, ReplicaDied, WeightSyncError
from coupler.interfaces import InFlight, Memory, Model, Rank, Request, WeightUpdate
from coupler_rollout_sglang import messages
from coupler_rollout_sglang.arguments import positions_of, text_config
from coupler_rollout_sglang.compat.version import installed
from coupler_rollout_sglang.completions import Routers, Sampling, said, sampling_of, top_k_of
from coupler_rollout_sglang.config import Mode
from coupler_rollout_sglang.links import EngineEnded, HttpLink, Link, PrivateLink

ALIVE_S = 1.0
"""Seconds between two looks at whether the engine lives, during a call."""
FLUSH_S = 10.0
"""Seconds within which the cache of an engine that has nothing to do is empty."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Hold what a model worker says of itself."""

    pid: int
    held: int
    """Bytes that it holds on its device, with those that it gave back."""
    free: int
    """Bytes that are free there."""
    cache_tokens: int
    """Tokens that its cache has room for."""
    routers: tuple[int, ...] = ()
    """Numbers of the layers whose router SGLang writes down."""

    @staticmethod
    def of(row: list[float]) -> Worker:
        """Return what a row of numbers says."""
        pid, held, free, cache_tokens, *routers = map(int, row)
        return Worker(pid, held, free, cache_tokens, tuple(routers))


class SGLangRollout(GatedRollout):
    """One replica of SGLang."""

    def __init__(self, config: Any, model: Model) -> None:
        """Check that SGLang is here, unless a server is elsewhere.

        Raises:
            PluginError: SGLang is not installed, or outside the tested range.
        """
        if not config.server:
            installed()
        super().__init__(config, model)
        self.prepared: PrivateLink | None = None
        self.link: Link | None = None
        self.end: finalize[..., Any] | None = None
        # Requests in the engine. A name is no beginning of another one, since SGLang
        # cuts off all that begin with a name.
        self._running: dict[str, None] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    async def prepare(self, rank: Rank) -> None:
        """Start the engine, which waits before it takes a device. A server does not."""
        self.close()
        if self.config.mode is not Mode.SERVER:
            self.prepared = PrivateLink(self._asked(rank))
            # The engine ends with this process at the latest.
            self.end = finalize(self, self.prepared.close)

    async def setup(self, rank: Rank) -> int:
        """Start the engine with random weights. An engine that died is started again.

        Raises:
            CouplerError: SGLang did not start. Its own log lines say why.
            ReplicaDied: one of its processes ended meanwhile.
        """
        if self.prepared is None:
            await self.prepare(rank)
        self.begin(rank)
        # A server has caches of earlier runs.
        self.started = uuid4().hex
        self._running.clear()
        self.idle.set()

        text = text_config(Path(self.model.path))
        self.max_tokens = self.config.max_model_len or positions_of(text)
        self.vocabulary = int(text["vocab_size"])

        if self.config.mode is Mode.SERVER:
            http = HttpLink(self.config.server, self._asked(rank))
            self.end = finalize(self, http.close)
            self.link = http
        else:
            self.link, self.prepared = self.prepared, None
        assert self.link
        await self.link.ready()

        self.workers = await self._facts()
        if self.config.server:
            # A run that ended amid a sync left it frozen.
            await self.thaw()
        self.routers: Routers | None = None
        if self.config.routed_experts:
            self.routers = Routers(
                text["num_hidden_layers"], text[messages.TOPK], self.workers[0].routers
            )
        self.given_back = dict.fromkeys(Memory, 0)
        return len(self.workers)

    def _asked(self, rank: Rank) -> dict[str, Any]:
        return {
            "config": asdict(self.config),
            "model": self.model.path,
            "trust_remote_code": self.model.trust_remote_code,
            "own_weights": self.model.own_weights,
            "seed": rank.seed,
        }

    # --- requests

    @property
    def running(self) -> Mapping[str, None]:
        return self._running

    def check(self, request: Request) -> None:
        """Refuse nothing: SGLang samples at every temperature."""

    async def stay(self, request: Request, done: Sampled, room: int) -> tuple[Sampling, str]:
        prompt = [*request.prompt, *done.tokens]
        name = uuid4().hex
        body = {
            "rid": name,
            "input_ids": prompt,
            "sampling_params": self._parameters(request, room - len(done.tokens)),
            "return_logprob": True,
            # No log-probs of the prompt.
            "logprob_start_len": -1,
            # No cache of older weights has this key.
            "extra_key": f"{self.started}-{self.updates}",
        }
        if self.config.max_lora_rank:
            # It is 0 while an update has brought the weights alone.
            body["lora_path"] = messages.ADAPTER
        routers = self.routers if request.routed_experts else None
        if routers is not None:
            body["return_routed_experts"] = True

        self._running[name] = None
        self.idle.clear()
        try:
            status, output = await self._call("generate", body)
        except asyncio.CancelledError:
            await self._call("abort_request", {"rid": name})
            raise
        finally:
            del self._running[name]
            if not self._running:
                self.idle.set()

        if status != HTTPStatus.OK:
            raise CouplerError(f"SGLang refused a request: {said(output)}")
        return sampling_of(output, len(prompt), top_k_of(request), routers)

    def _parameters(self, request: Request, room: int) -> dict[str, Any]:
        """Return SGLang's sampling parameters.

        Its seed goes with the position of a token, so that a request that enters again
        goes on as if it had not been cut off.
        """
        return {
            "max_new_tokens": room,
            "temperature": request.temperature,
            "top_p": request.top_p if request.temperature else 1.0,
            "top_k": top_k_of(request) or -1,
            "stop_token_ids": list(request.stop),
            "sampling_seed": request.seed % 2**63,
            "skip_special_tokens": False,
        }

    async def freeze(self) -> None:
        await self._call("pause_generation", {"mode": "in_place"})

    async def thaw(self) -> None:
        await self._call("continue_generation", {})

    async def cut_off(self) -> None:
        await asyncio.gather(
            *(self._call("abort_request", {"rid": name}) for name in list(self._running))
        )

    async def drained(self) -> None:
        await self._alive(self.idle.wait())

    async def check_alive(self) -> None:
        try:
            await self._link().check()
        except EngineEnded as error:
            raise self._died() from error

    # --- weights

    async def load(self, update: WeightUpdate) -> list[dict[str, Any]]:
        """Load the weights inside every model worker, and empty the cache unless it is
        frozen.
        """
        answers = await self._push(update)
        # A frozen request that was cancelled leaves the engine when that goes on.
        if self.paused is not InFlight.STALE_KV:
            await self._flush()
        return answers

    async def checksums(self) -> list[dict[str, int]]:
        """Return the checksums of the weights in each model worker.

        See :func:`~coupler.engine_kit.inference.checksums.of_plan`.
        """
        return [answer["checksums"] for answer in await self._push(None)]

    async def _push(self, update: WeightUpdate | None) -> list[dict[str, Any]]:
        """Give every model worker our message, and return their answers."""
        status, answer = await self._call("begin_weight_update", {})
        session = status != HTTPStatus.NOT_FOUND
        if session:
            self._accepted(status, answer)

        body = {
            "serialized_named_tensors": [messages.payload(update)] * self.config.tensor_parallel,
            "load_format": messages.LOADER,
            "flush_cache": False,
        }
        try:
            answer = self._accepted(*await self._call("update_weights_from_tensor", body))
        finally:
            if session:
                await self._call("end_weight_update", {})

        answers = messages.answers_of(answer["message"])
        for each in answers:
            if "error" in each:
                kind, text = each["error"]
                raise {**vars(errors), "MemoryError": MemoryError}[kind](text)
        return answers

    def _accepted(self, status: int, answer: dict[str, Any]) -> dict[str, Any]:
        if status != HTTPStatus.OK or not answer.get("success", True):
            raise WeightSyncError(f"SGLang refused a weight update: {said(answer)}")
        return answer

    async def _flush(self) -> None:
        """Empty the prefix cache.

        Raises:
            WeightSyncError: SGLang still has requests, though we have none.
        """
        until = time.monotonic() + FLUSH_S
        while (await self._call("flush_cache", {}))[0] != HTTPStatus.OK:
            if time.monotonic() > until:
                raise WeightSyncError(
                    "SGLang did not empty its cache after a weight update, since it has requests "
                    "that are not ours.\n  look at:  who else uses the server"
                )
            await asyncio.sleep(0.01)

    # --- memory

    async def release(self, parts: list[Memory]) -> None:
        """Give back the memory of these parts, and count how much it was."""
        if parts:
            await self._flush()
        for part in parts:
            before = await self._facts()
            await self._done("release_memory_occupation", {"tags": [str(part)]})
            after = await self._facts()
            freed = (new.free - old.free for old, new in zip(before, after, strict=True))
            self.given_back[part] = max(0, *freed)

    async def restore(self, parts: list[Memory]) -> None:
        for part in parts:
            await self._done("resume_memory_occupation", {"tags": [str(part)]})
            self.given_back[part] = 0

    async def device_bytes(self) -> int:
        held = max(worker.held for worker in await self._facts())
        return max(held - sum(self.given_back.values()), 0)

    async def host_bytes(self) -> int:
        pids = {os.getpid(), *(worker.pid for worker in self.workers), *self._link().pids()}
        return sum(map(resident_bytes, pids))

    async def _facts(self) -> list[Worker]:
        """Return what every model worker says of itself.

        Raises:
            CouplerError: the engine is not one of ours.
        """
        _, rows = await self._call("get_weights_by_name", {"name": messages.FACTS})
        if not isinstance(rows, list) or not rows:
            raise CouplerError(
                "this SGLang has not what Coupler needs in it.\n  start it with:  python -m "
                "coupler_rollout_sglang.server, where coupler-rollout-sglang is installed"
            )
        # Parts of a replica that share no requests answer each for all.
        rows = rows[0] if isinstance(rows[0][0], list) else rows
        return [Worker.of(row) for row in rows]

    async def _done(self, name: str, body: dict[str, Any]) -> None:
        status, answer = await self._call(name, body)
        if status != HTTPStatus.OK:
            raise CouplerError(f"SGLang refused {name}: {said(answer)}")

    # --- the engine's processes

    def _link(self) -> Link:
        if self.link is None:
            raise CouplerError("the rollout has not started.\n  call:  setup()")
        return self.link

    async def _call(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        return await self._alive(self._link().call(name, body))

    async def _alive(self, call: Any) -> Any:
        """Wait for a call to the engine for as long as the engine lives."""
        task = asyncio.ensure_future(call)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=ALIVE_S)
                if done:
                    return task.result()
                await self._link().check()
        except EngineEnded as error:
            raise self._died() from error
        finally:
            task.cancel()

    def _died(self) -> ReplicaDied:
        return ReplicaDied(
            f"the SGLang engine of rollout replica {self.rank.index} died.\n"
            "  look at:  its last lines above, or the log of this replica; out of memory, "
            "most often"
        )

    def close(self) -> None:
        """End the engine's processes."""
        self.prepared = None
        if self.end is not None:
            self.end()
