"""Start the roles of a job on shared devices, and say what each holds there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from coupler.config.schema import ExecutorName, Offload, Placement, RunConfig
from coupler.conversation.episodes import together
from coupler.engine_kit.memory_plan import Phase
from coupler.errors import ConfigError
from coupler.executors.placement import JUDGE
from coupler.interfaces import Memory, Part, ShardingManager
from coupler.loop.device_memory import Held, Holder, Kept, Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.rollout_group import RolloutGroup
from coupler.loop.trainer import TRAINED
from coupler.run.memory_plan import MemoryPlan, Parts, plan_memory
from coupler.run.plan import Plan
from coupler.system.gpu import gpu_is_visible
from coupler.system.log import get_logger
from coupler.system.process_memory import host_shortage, resident_bytes

log = get_logger(__name__)


class Asked(Protocol):
    """The workers of models that are asked about episodes."""

    reward_model: EngineGroup | None
    judge: RolloutGroup | None


@dataclass
class Nobody:
    """No model is asked."""

    reward_model: EngineGroup | None = None
    judge: RolloutGroup | None = None


NOBODY = Nobody()
PARTS = 4
"""Parts of a step, few enough that each fills micro-batches of all ranks."""


async def start(
    residency: Residency,
    weights: ShardingManager | None,
    *engines: EngineGroup | None,
    opinions: Asked = NOBODY,
    plan: Plan | None = None,
) -> None:
    """Set up the engines, and then the rollouts that ``weights`` go to, if any do.

    A rollout takes its share of the free memory, so that it comes last, and the judge
    before it. What needs no memory of a device they do while engines load.

    Args:
        plan: where rollouts and judge have devices of their own by it, they start while
            engines do.
    """

    async def start_engines() -> None:
        for group in filter(None, (*engines, opinions.reward_model)):
            log.info(f"loading the {group.spec.role}")
            await residency.start(group.spec.role, group.setup)

    async def start_rollouts() -> None:
        if opinions.judge:
            log.info("loading the judge")
            await residency.start(JUDGE, opinions.judge.setup)
        if weights:
            log.info("loading the rollout")
            await residency.start("rollout", weights.setup)

    if opinions.judge:
        await opinions.judge.prepare()
    if weights:
        await weights.rollouts.prepare()

    if plan and plan.placement is Placement.DISJOINT:
        await together((start_engines(), start_rollouts()))
    else:
        await start_engines()
        await start_rollouts()


def parts_of(config: RunConfig, plan: Plan, residency: Residency) -> int:
    """Return the parts of a step that engines complete while rollouts sample the rest.

    There are several where both have devices of their own, keep their memory, and wait
    for each other.
    """
    waits = plan.placement is Placement.DISJOINT and not config.max_staleness
    return PARTS if waits and not residency.shared else 1


def hold_state(residency: Residency, role: str) -> AbstractAsyncContextManager[None]:
    """Hold the state of a role on its device, to be written.

    The rollout's weights stay there, because nothing would bring them back.
    """
    return residency(
        "save",
        {role: frozenset({Held.PARAMS, Held.OPTIMIZER}), "rollout": frozenset({Held.WEIGHTS})},
    )


def hold_trained(residency: Residency, role: str) -> AbstractAsyncContextManager[None]:
    """Hold all of a role on its device, to be restored. Weights follow."""
    return residency("restore", {role: TRAINED})


def share_devices(
    config: RunConfig,
    plan: Plan | None,
    rollouts: RolloutGroup | None,
    policy: EngineGroup,
    reference: EngineGroup | None = None,
    critic: EngineGroup | None = None,
    *teachers: EngineGroup,
    opinions: Asked = NOBODY,
) -> Residency:
    """Return the residency of a run whose roles live on the same devices.

    They take turns if ``offload`` says so, where AUTO needs a plan to.

    Raises:
        ConfigError: this host has too little memory for what leaves its devices.
    """
    # Without Ray all engines are in this process.
    apart = config.executor is ExecutorName.RAY

    holders = {"policy": _engine_holder(policy, apart)}
    if rollouts:
        holders["rollout"] = _rollout_holder(rollouts, apart)
    for frozen in filter(None, (reference, *teachers, opinions.reward_model)):
        holders[frozen.spec.role] = _engine_holder(frozen, apart, frozenset({Held.PARAMS}))
    if critic:
        holders["critic"] = _engine_holder(critic, apart)
    if opinions.judge:
        # Nothing would bring its weights back.
        holders[JUDGE] = _rollout_holder(opinions.judge, apart, frozenset({Held.KV_CACHE}))

    every = config.offload is Offload.TRUE
    if plan is None or plan.offload is Offload.FALSE or (every and not gpu_is_visible()):
        return Residency(holders, shared=every)

    memory = plan_memory(config, plan)
    if not apart:
        check_host(memory)
    if every:
        return Residency(holders, shared=True)
    return Residency(
        holders, shared=memory.offload is not Offload.FALSE, stays=stays_of(memory, holders)
    )


def check_host(memory: MemoryPlan) -> None:
    """Check that this host has room for what leaves the devices of all ranks.

    Raises:
        ConfigError: it has not, by the estimate of ``plan --memory``.
    """
    if text := host_shortage(memory.host_bytes):
        raise ConfigError(text)


def stays_of(memory: MemoryPlan, holders: Mapping[str, Holder]) -> dict[Kept, Kept]:
    """Return what need not leave, by all that works in a phase.

    A rollout and a judge start beside what they sample beside, so that no engine gives
    away then what it keeps later.
    """

    def movable(parts: Parts) -> Kept:
        held = [(role, Held(kind)) for role, kind in parts if kind is not None and role in holders]
        return frozenset((role, part) for role, part in held if part in holders[role].parts)

    turns = [row for device in memory.devices for row in device.turns]
    stays = {movable(row.active): movable(row.stays) for row in turns}

    for row in turns:
        if row.phase is Phase.SAMPLING:
            there = movable(row.active | row.stays)
            for role in holders.keys() & {"rollout", JUDGE}:
                own = frozenset((role, part) for part in holders[role].parts)
                stays.setdefault(own, there - own)

    return stays


def _engine_holder(
    group: EngineGroup,
    apart: bool,
    parts: frozenset[Held] = frozenset({Held.PARAMS, Held.GRADS, Held.OPTIMIZER}),
) -> Holder:
    """Return the holder of an engine.

    Of engines in one process, the policy reports the device memory of all.
    """

    async def evict(part: Held) -> None:
        await group.offload(frozenset({Part(part)}))

    async def admit(part: Held) -> None:
        await group.onload(frozenset({Part(part)}))

    async def device_bytes() -> int:
        return await group.device_bytes() if apart or group.spec.role == "policy" else 0

    async def host_bytes() -> int:
        return await group.host_bytes() if apart else 0

    return Holder(parts, evict, admit, device_bytes, host_bytes)


def _rollout_holder(
    rollouts: RolloutGroup,
    apart: bool,
    parts: frozenset[Held] = frozenset({Held.WEIGHTS, Held.KV_CACHE}),
) -> Holder:
    async def evict(part: Held) -> None:
        await rollouts.sleep(frozenset({Memory(part)}))

    async def admit(part: Held) -> None:
        await rollouts.wake(frozenset({Memory(part)}))

    async def device_bytes() -> int:
        return await rollouts.device_bytes()

    async def host_bytes() -> int:
        most = await rollouts.host_bytes()
        # Without Ray this process is one of the rollout's own.
        return most if apart else max(most - resident_bytes(), 0)

    return Holder(parts, evict, admit, device_bytes, host_bytes)
