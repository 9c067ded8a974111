"""Who holds device memory when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from coupler.errors import CouplerError
from coupler.loop.device_memory import Held, Holder, Kept, Residency

ENGINE = frozenset({Held.PARAMS, Held.GRADS, Held.OPTIMIZER})
ROLLOUT = frozenset({Held.WEIGHTS, Held.KV_CACHE})
BOTH = {"policy": ENGINE, "rollout": ROLLOUT}


def build(
    shared: bool,
    more: Mapping[str, frozenset[Held]] | None = None,
    stays: Mapping[Kept, Kept] | None = None,
) -> tuple[Residency, list[str]]:
    moves: list[str] = []

    def holder(role: str, parts: frozenset[Held]) -> Holder:
        async def evict(part: Held) -> None:
            moves.append(f"-{role}.{part}")

        async def admit(part: Held) -> None:
            moves.append(f"+{role}.{part}")

        async def device_bytes() -> int:
            return (1 if role == "policy" else 2) << 30

        async def host_bytes() -> int:
            return 0 if role == "policy" else 3 << 30

        return Holder(parts, evict, admit, device_bytes, host_bytes)

    parts = {**BOTH, **(more or {})}
    holders = {role: holder(role, held) for role, held in parts.items()}
    residency = Residency(holders, shared=shared, stays=stays or {})

    async def start() -> None:
        for role in holders:

            async def setup(role: str = role) -> None:
                moves.append(f"start {role}")

            await residency.start(role, setup)

    asyncio.run(start())
    return residency, moves


def test_grads_and_optimizer_leave_before_rollout_weights_wake() -> None:
    residency, moves = build(shared=True)

    async def go() -> None:
        async with residency("train", {"policy": ENGINE}):
            moves.append("train")
        async with residency(
            "sync", {"policy": frozenset({Held.PARAMS}), "rollout": frozenset({Held.WEIGHTS})}
        ):
            moves.append("sync")
        async with residency("sample", {"rollout": ROLLOUT}):
            moves.append("sample")

    asyncio.run(go())
    assert moves == [
        "start policy",
        "-policy.grads",
        "-policy.optimizer",
        "-policy.params",
        "start rollout",
        "-rollout.kv_cache",
        "-rollout.weights",
        "+policy.params",
        "+policy.optimizer",
        "+policy.grads",
        "train",
        "-policy.grads",
        "-policy.optimizer",
        "+rollout.weights",
        "sync",
        "-policy.params",
        "+rollout.kv_cache",
        "sample",
    ]
    found = {name: metric.value for name, metric in residency.metrics().items() if "sync" in name}
    assert found.pop("memory/sync/host_gib") > 0
    device = {
        "memory/sync/policy_gib": 1,
        "memory/sync/rollout_gib": 2,
        "memory/sync/device_gib": 3,
    }
    assert found == {**device, "memory/sync/rollout_host_gib": 3}, (
        "a role in this process has no number of its own"
    )


def test_seconds_of_hand_overs_are_of_one_step() -> None:
    residency, _ = build(shared=True)
    started = residency.metrics()
    assert started["time/leave_policy"].value > 0 and "time/return_policy" not in started

    async def go() -> None:
        async with residency("train", {"policy": ENGINE}):
            pass

    asyncio.run(go())
    found = {name for name in residency.metrics() if name.startswith("time/")}
    assert found == {"time/leave_rollout", "time/return_policy"}
    assert not any(name.startswith("time/") for name in residency.metrics())


def test_models_that_score_have_their_memory_while_episodes_are_sampled() -> None:
    """The weights of a judge stay, because nothing would bring them back."""
    scoring = {"reward_model": frozenset({Held.PARAMS}), "judge": frozenset({Held.KV_CACHE})}
    residency, moves = build(shared=True, more=scoring)
    moves.clear()

    async def go() -> None:
        async with residency.generating("sample"):
            moves.append("sample")
        async with residency("train", {"policy": ENGINE}):
            moves.append("train")
        async with residency.generating("sample"):
            moves.append("sample again")

    asyncio.run(go())
    trains = moves.index("train")
    left, back = moves[moves.index("sample") : trains], moves[trains:]
    assert {"-reward_model.params", "-judge.kv_cache"} <= set(left)
    assert {"+reward_model.params", "+judge.kv_cache"} <= set(back)
    assert "-judge.weights" not in moves


def test_what_fits_beside_a_phase_stays() -> None:
    every = frozenset((role, p) for role, its in BOTH.items() for p in its)
    trains = frozenset(("policy", part) for part in ENGINE)
    samples = frozenset(("rollout", part) for part in ROLLOUT)
    weights, grads = ("rollout", Held.WEIGHTS), ("policy", Held.GRADS)
    stays = {trains: frozenset({weights}), samples: every - samples - {grads}}
    residency, moves = build(shared=True, stays=stays)

    async def go() -> None:
        for _ in range(2):
            async with residency("train", {"policy": ENGINE}):
                moves.append("train")
            async with residency("sample", {"rollout": ROLLOUT}):
                moves.append("sample")

    asyncio.run(go())
    turn = ["-rollout.kv_cache", "+policy.grads", "train", "-policy.grads", "+rollout.kv_cache"]
    assert moves == ["start policy", "-policy.grads", "start rollout", *[*turn, "sample"] * 2]


def test_nothing_moves_where_devices_are_not_shared() -> None:
    residency, moves = build(shared=False)

    async def go() -> None:
        async with (
            residency("train", {"policy": ENGINE}),
            residency("sample", {"rollout": ROLLOUT}),
        ):
            moves.append("both")

    asyncio.run(go())
    assert moves == ["start policy", "start rollout", "both"]
    policy, rollout = {"policy": 1 << 30}, {"rollout": 2 << 30}
    asked = {"start_policy": policy, "start_rollout": rollout, "sample": rollout, "train": policy}
    assert residency.ledger == asked


def test_out_of_memory_names_the_phase_and_who_holds_what() -> None:
    residency, _ = build(shared=True)

    async def go() -> None:
        async with residency("sample", {"rollout": ROLLOUT}):
            pass
        async with residency("train", {"policy": ENGINE}):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    who = "out of memory in phase train.*policy: grads, optimizer, params; rollout: nothing"
    with pytest.raises(CouplerError, match=rf"(?s){who}.*sample policy 1.0 GiB \+ rollout 2.0 GiB"):
        asyncio.run(go())
