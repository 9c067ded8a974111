"""Who holds device memory when: one owner per device set, and a ledger of what each phase measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from resource import getpagesize

from coupler.errors import CouplerError
from coupler.metrics import Metric, Metrics


class Held(StrEnum):
    """What a role can hold, in the order in which it is evicted; it is admitted in the opposite order."""

    GRADS = "grads"
    OPTIMIZER = "optimizer"
    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"  # of a rollout
    PARAMS = "params"  # of an engine


@dataclass(frozen=True, slots=True)
class Holder:
    """One role on the device set: what it can hold, and how it lets go of it and takes it back."""

    parts: frozenset[Held]
    evict: Callable[[Held], Awaitable[None]]
    admit: Callable[[Held], Awaitable[None]]


class Residency:
    """Moves memory between roles that share devices; phases then take turns.

    With ``shared=False`` everybody stays, phases may overlap, and only the ledger runs.

    Example:
        ``async with residency("train", {"policy": frozenset({Held.PARAMS, Held.GRADS, Held.OPTIMIZER})}): ...``
        evicts what other roles hold, then brings in what is named.
    """

    def __init__(
        self, holders: Mapping[str, Holder], *, shared: bool, device_bytes: Callable[[], Awaitable[int]]
    ) -> None:
        self.holders, self.shared, self.device_bytes = dict(holders), shared, device_bytes
        self.resident = {role: set(holder.parts) for role, holder in holders.items()}
        self.ledger: dict[str, tuple[int, int]] = {}  # phase -> most (device bytes, host bytes) seen at its end
        self.lock = asyncio.Lock()

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
            await self._measure(phase)

    async def _exchange(self, needs: Mapping[str, frozenset[Held]]) -> None:
        for part in Held:
            for role, holder in self.holders.items():
                if part in self.resident[role] and part not in needs.get(role, frozenset()):
                    await holder.evict(part)
                    self.resident[role].discard(part)
        for part in reversed(Held):
            for role, wanted in needs.items():
                if part in wanted and part not in self.resident[role]:
                    await self.holders[role].admit(part)
                    self.resident[role].add(part)

    async def _measure(self, phase: str) -> None:
        device, host = await self.device_bytes(), _host_bytes()
        most = self.ledger.get(phase, (0, 0))
        self.ledger[phase] = max(most[0], device), max(most[1], host)

    def _describe(self, phase: str, error: BaseException) -> str:
        held = "; ".join(f"{role}: {', '.join(sorted(parts)) or 'nothing'}" for role, parts in self.resident.items())
        return (
            f"out of memory in phase {phase}: {str(error).splitlines()[0]}\n"
            f"  held on the device:  {held}\n"
            "  try:  offload=true, a smaller engine.max_tokens_per_gpu, or a smaller cache of the rollout"
        )

    def metrics(self) -> Metrics:
        """The ledger in GiB, per phase."""
        gib = 1 << 30
        device = {f"memory/{p}/device_gib": Metric(d / gib, how="max") for p, (d, _) in self.ledger.items() if d}
        host = {f"memory/{p}/host_gib": Metric(h / gib, how="max") for p, (_, h) in self.ledger.items()}
        return device | host


def _host_bytes() -> int:
    """Resident memory of this process; 0 where the system has no /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * getpagesize() if statm.exists() else 0
