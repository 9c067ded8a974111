"""Let roles that share devices take turns on their memory, and record how much each
phase used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

from coupler.errors import CouplerError
from coupler.metrics import Metric, Metrics
from coupler.system.phases import entered
from coupler.system.process_memory import resident_bytes

GIB = 1 << 30


class Held(StrEnum):
    """A kind of memory that a role holds. Members are listed in the order of eviction,
    and are admitted in the opposite order.
    """

    GRADS = "grads"
    OPTIMIZER = "optimizer"
    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"  # of a rollout
    PARAMS = "params"  # of an engine


# parts of roles
Kept = frozenset[tuple[str, Held]]
NOTHING: Mapping[Kept, Kept] = {}


@dataclass(frozen=True, slots=True)
class Holder:
    """One role on the device set.

    Attributes:
        parts: the kinds of memory that it can hold.
        evict: frees one kind.
        admit: brings one kind back.
        device_bytes: device memory of the role's process that holds most.
        host_bytes: host memory of that process, where it is not the controller's.
    """

    parts: frozenset[Held]
    evict: Callable[[Held], Awaitable[None]]
    admit: Callable[[Held], Awaitable[None]]
    device_bytes: Callable[[], Awaitable[int]]
    host_bytes: Callable[[], Awaitable[int]]


GENERATING = {
    "rollout": frozenset({Held.WEIGHTS, Held.KV_CACHE}),
    # the models that score what was generated, where there are any
    "reward_model": frozenset({Held.PARAMS}),
    "judge": frozenset({Held.KV_CACHE}),
}
SYNCING = {"policy": frozenset({Held.PARAMS}), "rollout": frozenset({Held.WEIGHTS})}


class Residency:
    """Moves memory between roles that share devices, one phase at a time.

    With ``shared=False`` every role keeps its memory, phases may overlap, and only the
    ledger is kept. A role takes part from its :meth:`start` on.

    Args:
        stays: what need not leave, by all that a phase needs.

    Example:
        ``async with residency("train", {"policy": frozenset({Held.PARAMS, Held.GRADS,
        Held.OPTIMIZER})}): ...`` evicts the memory of other roles, then brings in the
        policy's.
    """

    def __init__(
        self, holders: Mapping[str, Holder], *, shared: bool, stays: Mapping[Kept, Kept] = NOTHING
    ) -> None:
        self.holders, self.shared, self.stays = dict(holders), shared, stays

        # by role, once it was started
        self.resident: dict[str, set[Held]] = {}
        # phase -> role -> most device bytes seen at the end of the phase
        self.ledger: dict[str, dict[str, int]] = {}
        # phase -> role -> most host bytes; "" stands for the controller's process
        self.host: dict[str, dict[str, int]] = {}
        # of hand-overs since the last metrics(), by their names there
        self.seconds: dict[str, float] = {}
        self.lock = asyncio.Lock()

    def syncing(self, phase: str) -> AbstractAsyncContextManager[None]:
        """Hold the policy's parameters and the rollout's weights on the device."""
        return self(phase, SYNCING)

    def generating(self, phase: str) -> AbstractAsyncContextManager[None]:
        """Hold the rollout's weights and cache on the device, without the engines."""
        return self(phase, GENERATING)

    async def start(self, role: str, setup: Callable[[], Awaitable[None]]) -> None:
        """Set a role up while the others hold nothing.

        Afterwards the role holds every kind of memory that it can hold.

        Raises:
            CouplerError: the device ran out of memory.
        """
        parts = self.holders[role].parts
        self.resident[role] = set(parts)
        async with self(f"start_{role}", {role: parts}):
            await setup()

    @asynccontextmanager
    async def __call__(
        self, phase: str, needs: Mapping[str, frozenset[Held]]
    ) -> AsyncIterator[None]:
        """Hold ``needs`` during ``phase``.

        Raises:
            CouplerError: the device ran out of memory in this phase. The message lists
                what each role held.
        """
        async with self.lock if self.shared else nullcontext(), entered(phase):
            try:
                if self.shared:
                    await self._exchange(needs)
                yield

            except MemoryError as error:
                raise CouplerError(self._describe(phase, error)) from error
            except RuntimeError as error:
                if "out of memory" not in str(error).lower():
                    raise
                raise CouplerError(self._describe(phase, error)) from error

            await self._measure(phase, self.resident if self.shared else needs)

    async def _exchange(self, needs: Mapping[str, frozenset[Held]]) -> None:
        needed = frozenset((r, part) for r in self.resident for part in needs.get(r, ()))
        kept = needed | self.stays.get(needed, frozenset())
        for part in Held:
            for role, held in self.resident.items():
                if part in held and (role, part) not in kept:
                    await self._timed(f"time/leave_{role}", self.holders[role].evict(part))
                    held.discard(part)

        for part in reversed(Held):
            for role, held in self.resident.items():
                if part in needs.get(role, frozenset()) and part not in held:
                    await self._timed(f"time/return_{role}", self.holders[role].admit(part))
                    held.add(part)

    async def _timed(self, name: str, moves: Awaitable[None]) -> None:
        start = time.perf_counter()
        await moves
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    async def _measure(self, phase: str, roles: Iterable[str]) -> None:
        """Record the memory of ``roles`` at the end of ``phase``."""
        known = [role for role in roles if role in self.resident]

        for ledger, measure in ((self.ledger, "device_bytes"), (self.host, "host_bytes")):
            found = await asyncio.gather(
                *(getattr(self.holders[role], measure)() for role in known)
            )
            most = ledger.setdefault(phase, {})
            for role, size in zip(known, found, strict=True):
                most[role] = max(most.get(role, 0), size)

        self.host[phase][""] = max(self.host[phase].get("", 0), resident_bytes())

    def _describe(self, phase: str, error: BaseException) -> str:
        held = "; ".join(
            f"{role}: {', '.join(sorted(parts)) or 'nothing'}"
            for role, parts in self.resident.items()
        )
        before = "; ".join(
            f"{name} {_listed(roles)}" for name, roles in self.ledger.items() if any(roles.values())
        )
        so_far = f"  at the end of phases so far:  {before}\n" if before else ""

        return (
            f"out of memory in phase {phase}: {str(error).splitlines()[0]}\n"
            f"  held on the device:  {held}\n"
            f"{so_far}"
            "  try:  offload=true, a smaller engine.max_tokens_per_gpu, or a smaller cache "
            "of the rollout"
        )

    def metrics(self) -> Metrics:
        """Return the ledger in GiB by phase, for each role and for a whole device, and
        the seconds of hand-overs since the last call.
        """
        seconds, self.seconds = self.seconds, {}
        sizes: dict[str, int] = {}
        for phase, roles in self.ledger.items():
            for role, size in {**roles, "device": sum(roles.values())}.items():
                sizes[f"memory/{phase}/{role}_gib"] = size

            for role, size in self.host[phase].items():
                name = f"{role}_host" if role else "host"
                sizes[f"memory/{phase}/{name}_gib"] = size

        found = {name: Metric(size / GIB, how="max") for name, size in sizes.items() if size}
        return found | {name: Metric(each, how="sum") for name, each in seconds.items()}


def _listed(roles: Mapping[str, int]) -> str:
    return " + ".join(f"{role} {size / GIB:.1f} GiB" for role, size in roles.items() if size)
