"""Who holds device memory when."""

from __future__ import annotations

import asyncio

import pytest

from coupler.errors import CouplerError
from coupler.residency import Held, Holder, Residency

ENGINE = frozenset({Held.PARAMS, Held.GRADS, Held.OPTIMIZER})
ROLLOUT = frozenset({Held.WEIGHTS, Held.KV_CACHE})


def build(shared: bool) -> tuple[Residency, list[str]]:
    moves: list[str] = []

    def holder(role: str, parts: frozenset[Held]) -> Holder:
        async def evict(part: Held) -> None:
            moves.append(f"-{role}.{part}")

        async def admit(part: Held) -> None:
            moves.append(f"+{role}.{part}")

        return Holder(parts, evict, admit)

    async def device_bytes() -> int:
        return 1 << 30

    holders = {"policy": holder("policy", ENGINE), "rollout": holder("rollout", ROLLOUT)}
    return Residency(holders, shared=shared, device_bytes=device_bytes), moves


def test_grads_and_optimizer_leave_before_rollout_weights_wake() -> None:
    residency, moves = build(shared=True)

    async def go() -> None:
        async with residency("train", {"policy": ENGINE}):
            moves.append("train")
        async with residency("sync", {"policy": frozenset({Held.PARAMS}), "rollout": frozenset({Held.WEIGHTS})}):
            moves.append("sync")
        async with residency("sample", {"rollout": ROLLOUT}):
            moves.append("sample")

    asyncio.run(go())
    assert moves == [
        "-rollout.kv_cache",
        "-rollout.weights",
        "train",
        "-policy.grads",
        "-policy.optimizer",
        "+rollout.weights",
        "sync",
        "-policy.params",
        "+rollout.kv_cache",
        "sample",
    ]
    assert residency.metrics()["memory/sync/device_gib"].value == 1


def test_nothing_moves_where_devices_are_not_shared() -> None:
    residency, moves = build(shared=False)

    async def go() -> None:
        async with residency("train", {"policy": ENGINE}), residency("sample", {"rollout": ROLLOUT}):
            moves.append("both")

    asyncio.run(go())
    assert moves == ["both"]


def test_out_of_memory_names_the_phase_and_who_holds_what() -> None:
    residency, _ = build(shared=True)

    async def go() -> None:
        async with residency("train", {"policy": ENGINE}):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(
        CouplerError, match=r"(?s)out of memory in phase train.*policy: grads, optimizer, params; rollout: nothing"
    ):
        asyncio.run(go())
