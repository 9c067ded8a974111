"""Who holds device memory when: one owner per device set, and a ledger of what each phase measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

from coupler.errors import CouplerError
from coupler.metrics import Metric, Metrics
from coupler.system.process_memory import resident_bytes

GIB = 1 << 30


class Held(StrEnum):
    """What a role can hold, in the order in which it is evicted; it is admitted in the opposite order."""

    GRADS = "grads"
    OPTIMIZER = "optimizer"
    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"  # of a rollout
    PARAMS = "params"  # of an engine


@dataclass(frozen=True, slots=True)
class Holder:
    """One role on the device set: what it can hold, how it lets go of it and takes it back, and how much it has."""

    parts: frozenset[Held]
    evict: Callable[[Held], Awaitable[None]]
    admit: Callable[[Held], Awaitable[None]]
    device_bytes: Callable[[], Awaitable[int]]  # of its process that holds most
    host_bytes: Callable[[], Awaitable[int]]  # the same, of processes other than the controller's


GENERATING = {"rollout": frozenset({Held.WEIGHTS, Held.KV_CACHE})}
SYNCING = {"policy": frozenset({Held.PARAMS}), "rollout": frozenset({Held.WEIGHTS})}


class Residency:
    """Moves memory between roles that share devices; phases then take turns.

    With ``shared=False`` everybody stays, phases may overlap, and only the ledger runs. A role takes part from its
    :meth:`start` on.

    Example:
        ``async with residency("train", {"policy": frozenset({Held.PARAMS, Held.GRADS, Held.OPTIMIZER})}): ...``
        evicts what other roles hold, then brings in what is named.
    """

    def __init__(self, holders: Mapping[str, Holder], *, shared: bool) -> None:
        self.holders, self.shared = dict(holders), shared
        self.resident: dict[str, set[Held]] = {}  # of the roles that were started
        self.ledger: dict[str, dict[str, int]] = {}  # phase -> most bytes seen at its end, on the device by role
        self.host: dict[str, dict[str, int]] = {}  # the same on hosts; of this process under no role
        self.lock = asyncio.Lock()

    def syncing(self, phase: str) -> AbstractAsyncContextManager[None]:
        """Hold the policy's parameters and the rollout's weights on the device."""
        return self(phase, SYNCING)

    def generating(self, phase: str) -> AbstractAsyncContextManager[None]:
        """Hold the rollout's weights and its cache on the device, with the engines away."""
        return self(phase, GENERATING)

    async def start(self, role: str, setup: Callable[[], Awaitable[None]]) -> None:
        """Set a role up while the others hold nothing; from then on it holds all that it can.

        Raises:
            CouplerError: the device ran out of memory.
        """
        parts = self.holders[role].parts
        self.resident[role] = set(parts)
        async with self(f"start_{role}", {role: parts}):
            await setup()

    @asynccontextmanager
    async def __call__(self, phase: str, needs: Mapping[str, frozenset[Held]]) -> AsyncIterator[None]:
        """Hold ``needs`` during ``phase``.

        Raises:
            CouplerError: the device ran out of memory in this phase; the message says who held what.
        """
        async with self.lock if self.shared else nullcontext():
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
        for part in Held:
            for role, held in self.resident.items():
                if part in held and part not in needs.get(role, frozenset()):
                    await self.holders[role].evict(part)
                    held.discard(part)
        for part in reversed(Held):
            for role, wanted in needs.items():
                if part in wanted and part not in self.resident[role]:
                    await self.holders[role].admit(part)
                    self.resident[role].add(part)

    async def _measure(self, phase: str, roles: Iterable[str]) -> None:
        """Ask who may have changed: everybody where they take turns, else who the phase was for."""
        known = [role for role in roles if role in self.resident]
        for ledger, measure in ((self.ledger, "device_bytes"), (self.host, "host_bytes")):
            found = await asyncio.gather(*(getattr(self.holders[role], measure)() for role in known))
            most = ledger.setdefault(phase, {})
            most |= {role: max(most.get(role, 0), size) for role, size in zip(known, found, strict=True)}
        self.host[phase][""] = max(self.host[phase].get("", 0), resident_bytes())

    def _describe(self, phase: str, error: BaseException) -> str:
        held = "; ".join(f"{role}: {', '.join(sorted(parts)) or 'nothing'}" for role, parts in self.resident.items())
        before = "; ".join(f"{name} {_listed(roles)}" for name, roles in self.ledger.items() if any(roles.values()))
        return (
            f"out of memory in phase {phase}: {str(error).splitlines()[0]}\n"
            f"  held on the device:  {held}\n"
            + (f"  at the end of phases so far:  {before}\n" if before else "")
            + "  try:  offload=true, a smaller engine.max_tokens_per_gpu, or a smaller cache of the rollout"
        )

    def metrics(self) -> Metrics:
        """The ledger in GiB, per phase: of each role, of all of them on one device, and on hosts."""
        found: Metrics = {}
        for phase, roles in self.ledger.items():
            parts = {**{role: size for role, size in roles.items() if size}, "device": sum(roles.values())}
            found |= {f"memory/{phase}/{p}_gib": Metric(n / GIB, how="max") for p, n in parts.items() if n}
            for role, size in self.host[phase].items():
                if size:
                    found[f"memory/{phase}/{role}{'_' * bool(role)}host_gib"] = Metric(size / GIB, how="max")
        return found


def _listed(roles: Mapping[str, int]) -> str:
    return " + ".join(f"{role} {size / GIB:.1f} GiB" for role, size in roles.items() if size)
