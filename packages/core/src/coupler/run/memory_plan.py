"""Add up the device memory of a run by phase and role, before anything is loaded.

Every backend estimates its own part (:mod:`coupler.engine_kit.memory_plan`). This adds
up what the roles of one device hold at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coupler.config.options import section
from coupler.config.schema import Devices, ExecutorName, Offload, Placement, RunConfig
from coupler.data.model_folder import model_folder
from coupler.engine_kit.memory_plan import (
    Asked,
    ChoosesRecompute,
    Kind,
    Needs,
    Phase,
    PlansMemory,
    Recomputed,
    Term,
    total,
)
from coupler.errors import ConfigError
from coupler.executors.placement import REWARD_MODEL, ROLLOUTS, TEACHER, Role, make_shares
from coupler.interfaces import EngineConfig, Head, Memory, Model, Part
from coupler.run.plan import SERVED_BY, Plan
from coupler.run.teacher_check import role_of, teachers_of
from coupler.system.files import DamagedFile, read_json
from coupler.system.gpu import device_bytes, gpu_is_visible
from coupler.system.reads import original
from coupler.system.words import ceil_div

# Device memory that core's own transports take on the side that sends.
SENDING = {"ipc": 512 << 20, "nccl": 512 << 20}
OFFLOADED: dict[Phase, tuple[Part, ...]] = {
    Phase.LOGPROBS: (Part.PARAMS,),
    Phase.TRAINING: (Part.PARAMS, Part.GRADS, Part.OPTIMIZER),
    Phase.SYNC: (Part.PARAMS,),
    Phase.SAVING: (Part.PARAMS, Part.OPTIMIZER),
}
"""What an engine holds in a phase of its own, where roles take turns."""


# kinds of memory by role
Parts = frozenset[tuple[str, Kind]]
ROOM = 0.85
"""Share of a device that ``offload=auto`` and ``gradient_checkpointing=auto`` fill:
estimates are within 15 % of what was measured."""
DEAR: tuple[Kind, ...] = (Part.PARAMS, Part.OPTIMIZER, Memory.WEIGHTS, Memory.KV_CACHE)
"""Memory that may stay under ``offload=auto``, by what it costs to move. Gradients are
none: they are no more when a phase ends."""


@dataclass(frozen=True, slots=True)
class Row:
    """The terms of one turn of a phase, by role.

    Attributes:
        active: what works in it, and cannot leave.
        stays: what else is on the device, and could leave.
    """

    phase: Phase
    terms: Mapping[str, tuple[Term, ...]]
    active: Parts
    stays: Parts

    @property
    def together(self) -> int:
        return sum(map(total, self.terms.values()))


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of the roles that share devices, on the one that holds most.

    Attributes:
        turns: one of each phase and of each engine that takes part in it alone.
        apart: whether every role keeps in a process of its own what it once took.
    """

    roles: tuple[str, ...]
    turns: tuple[Row, ...]
    apart: bool

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the turn of each phase that needs most."""
        phases = dict.fromkeys(row.phase for row in self.turns)
        return tuple(
            max((row for row in self.turns if row.phase is phase), key=lambda row: row.together)
            for phase in phases
        )

    def peak(self, role: str) -> int:
        """Return the most bytes that a role has in any turn."""
        return max((total(row.terms.get(role, ())) for row in self.turns), default=0)

    @property
    def kept(self) -> int:
        """Return what processes of their own have taken once all had their peak."""
        return sum(map(self.peak, self.roles)) if self.apart else 0

    @property
    def most(self) -> int:
        """Return the bytes that the device has to have."""
        return max(self.kept, *(row.together for row in self.rows))

    def training(self, role: str) -> int:
        """Return the bytes that the device has to have while a role trains."""
        own = (
            row.together
            for row in self.turns
            if row.phase is Phase.TRAINING and (role, Part.PARAMS) in row.active
        )
        return max(self.kept, *own)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of every device of a run.

    Attributes:
        gpu: whether it is that of a GPU. Otherwise it is host memory.
        device_bytes: memory of each device, 0 where it is not known.
        unknown: sentences on what is in no number.
        offload: the option as it is carried out: AUTO where some memory stays.
        host_bytes: host memory for what engines hold off their devices, of all ranks
            together.
        moved_bytes: what leaves one device in a step and comes back, by copies.
        recomputed: the layers that compute their activations again, of each role that
            leaves it to the plan.
    """

    devices: tuple[Device, ...]
    gpu: bool
    device_bytes: int
    unknown: tuple[str, ...]
    offload: Offload
    host_bytes: int = 0
    moved_bytes: int = 0
    recomputed: Mapping[str, Recomputed] = field(default_factory=dict)

    def beside(self, role: str) -> tuple[str, ...]:
        """Return the roles that share devices with a role, and the role itself."""
        return next(device.roles for device in self.devices if role in device.roles)

    def is_unknown(self, role: str) -> bool:
        """Tell whether a part of a role's memory is in no number."""
        return any(text.startswith(f"{role}: ") for text in self.unknown)


def plan_memory(config: RunConfig, plan: Plan, device_gib: float = 0) -> MemoryPlan:
    """Ask every backend, and add up.

    Args:
        device_gib: memory of one GPU. 0 asks the driver, and plans for the CPU where
            there is no GPU.

    Raises:
        ConfigError: a role's model folder has no config.json.
        CouplerError: a backend cannot describe the model.
    """
    config = original(config)
    gpu = bool(device_gib or gpu_is_visible()) and config.ray.devices is not Devices.CPU
    size = int(device_gib * 2**30) or (device_bytes() if gpu else 0)

    needs: dict[str, Needs] = {}
    asked: dict[str, Asked] = {}
    for role in plan.workers:
        policy = needs.get("policy", Needs())
        asked[role.name] = _asked(role, config, plan, gpu, size, policy)
        needs[role.name] = _ask(config, asked[role.name])
    unknown = tuple(f"{role}: {text}" for role, need in needs.items() for text in need.unknown)
    shares = [
        {role.name: needs[role.name] for role in share.roles}
        for share in make_shares(plan.workers, plan.placement or Placement.COLOCATED)
    ]
    room = int(ROOM * size) if gpu else 0
    offload = _resolved(config, plan, shares, room, bool(unknown))
    recomputed = {}
    for share in shares:
        recomputed |= _recomputed(config, plan, share, asked, offload, room)
    needs |= {role: each.needs for role, each in recomputed.items()}
    devices = tuple(_device(config, plan, share, offload, room) for share in shares)
    moved = {
        role: need.host + _parked(role, need, devices) if gpu else 0 for role, need in needs.items()
    }
    host = sum(moved[role.name] * role.count for role in plan.workers)
    moves = sum(moved.values())
    return MemoryPlan(devices, gpu, size, unknown, offload, host, moves, recomputed)


def _ask(config: RunConfig, asked: Asked) -> Needs:
    backend: Any = original(section(config, asked.path))
    if not isinstance(backend, PlansMemory):
        return Needs(unknown=(f"{backend.name} does not say what memory it needs",))
    return backend.memory_needs(asked)


def _asked(
    role: Role, config: RunConfig, plan: Plan, gpu: bool, device: int, policy: Needs
) -> Asked:
    path, model, trains = _of_role(role.name, config)
    settings: Any = original(section(config, path))
    longest, sequences = plan.max_tokens_per_sequence, plan.sequences_per_step
    asked = Asked(
        path=path,
        model=model,
        shape=_shape(Path(model.path), path),
        trains=trains,
        gpu=gpu,
        device_bytes=device,
        longest=longest,
        prompt=plan.max_prompt_tokens,
        sequences=ceil_div(sequences, role.count) * (1 + plan.max_staleness),
        parameters=policy.parameters if role.name in SERVED_BY and role.name != "judge" else 0,
    )

    if role.name not in ROLLOUTS:
        steps = plan.optimizer_steps_per_batch if trains else 1
        if role.name == "critic":
            steps = config.critic.optimizer_steps_per_batch or steps
        shards = max(settings.ranks // settings.ranks_per_shard, 1)
        each = ceil_div(sequences // steps, shards) * plan.max_rows_per_episode
        asked = replace(asked, tokens=longest * each)
    return asked


def _of_role(role: str, config: RunConfig) -> tuple[str, Model, bool]:
    """Return the section, the model and whether the role trains."""
    policy, path, trust = config.model.path, "engine", config.model.trust_remote_code
    key, head, trains = "model", Head.LM, role in ("policy", "critic")

    if role in SERVED_BY:
        path = SERVED_BY[role]
        if role == "judge":
            policy, key = config.judge.model.path, "judge.model"
    elif role == "critic":
        path, policy, head = "critic.engine", config.critic.model.path or policy, Head.VALUE
    elif role == REWARD_MODEL:
        path, key, head = "reward_model.engine", "reward_model.model", Head.SCORE
        policy = config.reward_model.model.path
    elif role.startswith(TEACHER):
        path, key, trust = "teacher.engine", "teacher.model", config.teacher.model.trust_remote_code
        named = {role_of(name): folder for name, folder in teachers_of(config.teacher).items()}
        policy = named[role]

    frozen = not trains and role not in ROLLOUTS
    return path, Model(model_folder(policy, key), trust, head, frozen=frozen), trains


def _shape(folder: Path, path: str) -> Mapping[str, Any]:
    try:
        return read_json(folder / "config.json")
    except DamagedFile as error:
        raise ConfigError(
            f"{folder}, the model of {path}, has no config.json to estimate memory from: {error}\n"
            "  try:  model.path=a folder in Hugging Face layout"
        ) from None


def _resolved(
    config: RunConfig, plan: Plan, shares: Sequence[Mapping[str, Needs]], room: int, unknown: bool
) -> Offload:
    """Return how roles take turns: AUTO where a part of the memory stays.

    What is unknown may need all of a device.

    Args:
        room: bytes of a GPU that may be filled, 0 on the CPU.
    """
    if plan.offload is not Offload.AUTO:
        return plan.offload
    if not room or (unknown and not plan.weights):
        return Offload.FALSE
    if unknown:
        return Offload.TRUE
    whole = [_device(config, plan, share, Offload.FALSE) for share in shares]
    return Offload.FALSE if all(each.most <= room for each in whole) else Offload.AUTO


def _recomputed(
    config: RunConfig,
    plan: Plan,
    share: dict[str, Needs],
    asked: Mapping[str, Asked],
    offload: Offload,
    room: int,
) -> dict[str, Recomputed]:
    """Choose the layers that compute again, of each role that leaves it to the plan.

    Roles choose one after the other, and ``share`` then has what they need.

    Args:
        room: bytes of a GPU that training may fill. 0 takes all layers.
    """
    found = {}
    known = room and not any(need.unknown for need in share.values())
    for role in list(share):
        backend: Any = original(section(config, asked[role].path))
        if not (asked[role].trains and leaves_recompute(backend)):
            continue

        def fits(needs: Needs, role: str = role) -> bool:
            device = _device(config, plan, {**share, role: needs}, offload, room)
            return device.training(role) <= room

        found[role] = backend.choose_recompute(asked[role], fits if known else None)
        share[role] = found[role].needs
    return found


def leaves_recompute(engine: EngineConfig) -> bool:
    """Tell whether an engine leaves it to the plan how many layers recompute."""
    return isinstance(engine, ChoosesRecompute) and engine.leaves_recompute


def with_recompute(config: RunConfig, memory: MemoryPlan) -> RunConfig:
    """Return the configuration with the numbers of layers that the plan chose."""
    for role, found in memory.recomputed.items():
        if role == "critic":
            config = replace(config, critic=replace(config.critic, engine=found.config))
        else:
            config = replace(config, engine=found.config)
    return config


def _device(
    config: RunConfig, plan: Plan, needs: Mapping[str, Needs], offload: Offload, room: int = 0
) -> Device:
    """Return a device whose roles take turns as ``offload`` says.

    Args:
        room: bytes up to which AUTO keeps what could leave.
    """
    turns = []
    for phase, active in _turns(plan, needs):
        row = _row(plan, phase, active, needs)
        if offload is Offload.FALSE:
            row = _row(plan, phase, active, needs, _all(needs) - row.active)
        for role, kind in _dear(needs) if offload is Offload.AUTO else ():
            more = row.stays | ({(role, kind)} - row.active)
            fuller = _row(plan, phase, active, needs, more)
            if fuller.together + _cached(needs, more) <= room:
                row = fuller
        turns.append(row)

    apart = config.executor is ExecutorName.RAY and offload is Offload.FALSE and len(needs) > 1
    return Device(tuple(needs), tuple(turns), apart)


def _turns(
    plan: Plan, needs: Mapping[str, Needs]
) -> Iterator[tuple[Phase, Mapping[str, Sequence[Kind]]]]:
    """Yield what works in each phase, with a turn of its own for each engine."""
    rollouts = [role for role in needs if role in ROLLOUTS]
    engines = [role for role in needs if role not in ROLLOUTS]
    sampling = dict.fromkeys(rollouts, (Memory.WEIGHTS, Memory.KV_CACHE))
    scoring = {role: (Part.PARAMS,) for role in engines if role == REWARD_MODEL}
    if rollouts:
        yield Phase.SAMPLING, {**sampling, **scoring}

    for role in engines:
        if role != REWARD_MODEL:
            yield Phase.LOGPROBS, {role: OFFLOADED[Phase.LOGPROBS]}
        if Phase.TRAINING in needs[role].peaks:
            yield Phase.TRAINING, {role: OFFLOADED[Phase.TRAINING]}
            weights = dict.fromkeys(rollouts, (Memory.WEIGHTS,))
            yield Phase.SAVING, {role: OFFLOADED[Phase.SAVING], **weights}

    if plan.weights:
        yield (
            Phase.SYNC,
            {"policy": OFFLOADED[Phase.SYNC], **dict.fromkeys(rollouts, (Memory.WEIGHTS,))},
        )


def _all(needs: Mapping[str, Needs]) -> Parts:
    return frozenset((role, kind) for role, need in needs.items() for kind in need.held)


def _dear(needs: Mapping[str, Needs]) -> list[tuple[str, Kind]]:
    """Return what may stay, the dearest to move first."""
    return [(role, kind) for kind in DEAR for role, need in needs.items() if kind in need.held]


def _cached(needs: Mapping[str, Needs], stays: Parts) -> int:
    """Return what the allocators of frozen models that stay keep of their phases.

    Models that train give it back with their gradients.
    """
    engines = [needs[role].peaks for role, kind in stays if kind is Part.PARAMS]
    frozen = [peaks for peaks in engines if Phase.TRAINING not in peaks]
    return sum(max(map(total, peaks.values()), default=0) for peaks in frozen)


def _parked(role: str, need: Needs, devices: Sequence[Device]) -> int:
    """Return the host memory of one worker whose engine leaves its device."""
    its = (device for device in devices if role in device.roles)
    there = [row.active | row.stays for device in its for row in device.turns]
    leaves = [kind for kind in (Part.PARAMS, Part.OPTIMIZER) if kind in need.held]
    return total(
        term
        for kind in leaves
        if any((role, kind) not in each for each in there)
        for term in need.held[kind]
        if term.parked
    )


def _row(
    plan: Plan,
    phase: Phase,
    active: Mapping[str, Sequence[Kind]],
    needs: Mapping[str, Needs],
    stays: Parts = frozenset(),
) -> Row:
    """Return what every role has while ``active`` ones hold these kinds and work."""
    works = frozenset((role, kind) for role, kinds in active.items() for kind in kinds)
    terms = {}
    for role, need in needs.items():
        # Nothing brings the weights of a judge back, so that they stay.
        kept = (None, Memory.WEIGHTS) if role == "judge" else (None,)
        there = {*kept, *(kind for name, kind in works | stays if name == role)}
        found = [term for kind, held in need.held.items() if kind in there for term in held]

        at_once = plan.max_staleness and role in ROLLOUTS
        # A reward model scores while episodes end.
        does = Phase.LOGPROBS if role == REWARD_MODEL else Phase.SAMPLING if at_once else phase
        if role in active or at_once:
            found += need.peaks.get(does, ())
        if role == "policy" and phase is Phase.SYNC:
            size = SENDING.get(plan.weight_path[1], 0)
            found.append(Term(f"buffers of sync.transport={plan.weight_path[1]}", size))
        terms[role] = tuple(term for term in found if term.size)
    return Row(phase, terms, works, stays)
