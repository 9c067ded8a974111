"""What the roles of one device hold at the same time, by phase, and what it says."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from coupler.cli import main
from coupler.config.compose import compose
from coupler.config.schema import Job, Offload
from coupler.engine_kit.memory_plan import (
    GIB,
    Asked,
    Kind,
    Needs,
    Phase,
    Recomputed,
    Term,
    fewest,
)
from coupler.errors import ConfigError
from coupler.interfaces import Memory, Part
from coupler.jobs.device_sharing import check_host, stays_of
from coupler.loop.device_memory import GENERATING, SYNCING, Held, Holder
from coupler.loop.trainer import TRAINED
from coupler.plugins.manager import Plugins
from coupler.run.memory_plan import MemoryPlan, leaves_recompute, plan_memory, with_recompute
from coupler.run.memory_text import render
from coupler.run.plan import make_plan
from coupler.system import process_memory
from coupler.testing.toy_config import ToyEngineConfig, ToyRolloutConfig

NEEDED = [
    "engine=toy", "rollout=toy", "algorithm=toy", "data.source=x.jsonl", "reward.target=a:b",
    "data.max_prompt_tokens=100", "sampling.max_tokens=28", "prompts_per_step=4",
    "samples_per_prompt=2",
]  # fmt: skip
asked_of: dict[str, Asked] = {}


@dataclasses.dataclass
class NeedyEngine(ToyEngineConfig):
    """Say what an engine with offload would, in whole GiB."""

    def memory_needs(self, asked: Asked) -> Needs:
        asked_of[asked.path] = asked
        held: dict[Kind, tuple[Term, ...]] = {Part.PARAMS: (Term("weights", 4 * GIB),)}
        peaks = {Phase.LOGPROBS: (Term("a pass", GIB),), Phase.SYNC: (Term("a tensor", GIB),)}
        if asked.trains:
            held |= {Part.OPTIMIZER: (Term("moments", 16 * GIB),)}
            held |= {Part.GRADS: (Term("gradients", 8 * GIB),)}
            peaks |= {Phase.TRAINING: (Term("activations", 32 * GIB, "engine.tokens=1"),)}
        return Needs(held=held, peaks=peaks, parameters=2 * GIB, unknown=("its noise",))


@dataclasses.dataclass
class CastingEngine(NeedyEngine):
    """One that also holds copies, which it makes anew after offload."""

    def memory_needs(self, asked: Asked) -> Needs:
        needs = super().memory_needs(asked)
        params = (*needs.held[Part.PARAMS], Term("copies", 2 * GIB, parked=False))
        return dataclasses.replace(needs, held={**needs.held, Part.PARAMS: params})


@dataclasses.dataclass
class ChoosingEngine(NeedyEngine):
    """One of eight layers with activations of 4 GiB each."""

    layers: int | None = None

    @property
    def leaves_recompute(self) -> bool:
        return self.layers is None

    def memory_needs(self, asked: Asked) -> Needs:
        needs = super().memory_needs(asked)
        kept = 8 - (8 if self.layers is None else self.layers)
        peaks = {**needs.peaks, Phase.TRAINING: (Term("activations", 4 * kept * GIB),)}
        return dataclasses.replace(needs, peaks=peaks if asked.trains else {}, unknown=())

    def choose_recompute(self, asked: Asked, fits: Callable[[Needs], bool] | None) -> Recomputed:
        def of(layers: int) -> ChoosingEngine:
            return dataclasses.replace(self, layers=layers)

        layers = fewest(8, lambda n: fits(of(n).memory_needs(asked))) if fits else 8
        return Recomputed(of(layers), of(layers).memory_needs(asked), layers, 8)


@dataclasses.dataclass
class NeedyRollout(ToyRolloutConfig):
    def memory_needs(self, asked: Asked) -> Needs:
        asked_of[asked.path] = asked
        held: dict[Kind, tuple[Term, ...]] = {
            None: (Term("graphs", GIB),),
            Memory.WEIGHTS: (Term("weights", 4 * GIB),),
            Memory.KV_CACHE: (Term("cache", 40 * GIB),),
        }
        return Needs(held=held, peaks={Phase.SAMPLING: (Term("logits", 2 * GIB),)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    return tmp_path


def planned(
    folder: Path, *overrides: str, gib: float = 80, needs: frozenset[str] | None = None
) -> MemoryPlan:
    plugins = Plugins.load()
    config = compose(plugins, [*NEEDED, f"model.path={folder}", *overrides], job=Job.TRAIN).config
    plan = make_plan(config, None, plugins, needs)
    critic = dataclasses.replace(config.critic, engine=NeedyEngine())
    config = dataclasses.replace(
        config, engine=NeedyEngine(), rollout=NeedyRollout(), critic=critic
    )
    return plan_memory(config, plan, gib)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def table(plan: MemoryPlan, device: int = 0) -> dict[str, dict[str, float]]:
    return {
        row.phase: {role: sum(t.size for t in terms) / GIB for role, terms in row.terms.items()}
        for row in plan.devices[device].rows
    }


def test_without_offload_every_role_keeps_what_it_holds(folder: Path) -> None:
    assert table(planned(folder)) == {
        "sampling": {"policy": 28, "rollout": 47},
        "log-probs": {"policy": 29, "rollout": 45},
        "training": {"policy": 60, "rollout": 45},
        "saving": {"policy": 28, "rollout": 45},
        "weight sync": {"policy": 29, "rollout": 45},
    }


def test_with_offload_roles_take_turns(folder: Path) -> None:
    plugins = Plugins.load()
    config = compose(plugins, [*NEEDED, f"model.path={folder}"], job=Job.TRAIN).config
    plan = make_plan(config, None, plugins, frozenset({"ref_logprobs"}))
    # Toy backends free no memory, so that a plan of theirs refuses to.
    plan = dataclasses.replace(plan, offload=Offload.TRUE)
    turns = dataclasses.replace(config, engine=NeedyEngine(), rollout=NeedyRollout())
    assert table(plan_memory(turns, plan, 80)) == {
        "sampling": {"policy": 0, "reference": 0, "rollout": 47},
        "log-probs": {"policy": 5, "reference": 0, "rollout": 1},
        "training": {"policy": 60, "reference": 0, "rollout": 1},
        "saving": {"policy": 20, "reference": 0, "rollout": 5},
        "weight sync": {"policy": 5, "reference": 0, "rollout": 5},
    }
    assert asked_of["engine"].model.frozen, "the reference was asked last"


def test_offload_takes_host_memory(folder: Path) -> None:
    """Of each rank what its engine holds, but not what is computed anew."""
    plugins = Plugins.load()
    config = compose(plugins, [*NEEDED, f"model.path={folder}"], job=Job.TRAIN).config
    plan = make_plan(config, None, plugins, frozenset({"ref_logprobs"}))
    stays = dataclasses.replace(config, engine=CastingEngine(), rollout=NeedyRollout())
    assert plan_memory(stays, plan, 80).host_bytes == 0
    plan = dataclasses.replace(plan, offload=Offload.TRUE)
    found = plan_memory(stays, plan, 80)
    assert found.host_bytes == (4 + 16 + 4) * GIB
    assert "host: 24.0 GiB, pinned, of all ranks together" in render(found)

    several = dataclasses.replace(
        plan, workers=[dataclasses.replace(role, count=2) for role in plan.workers]
    )
    assert plan_memory(stays, several, 80).host_bytes == 2 * (4 + 16 + 4) * GIB


@dataclasses.dataclass
class SureEngine(NeedyEngine):
    """One that says all that it needs."""

    def memory_needs(self, asked: Asked) -> Needs:
        return dataclasses.replace(super().memory_needs(asked), unknown=())


@dataclasses.dataclass
class FreshGradients(SureEngine):
    """One whose gradients exist only while it trains."""

    def memory_needs(self, asked: Asked) -> Needs:
        needs = super().memory_needs(asked)
        held = dict(needs.held)
        gradients = held.pop(Part.GRADS, ())
        peaks = {
            phase: (*terms, *gradients) if phase is Phase.TRAINING else terms
            for phase, terms in needs.peaks.items()
        }
        return dataclasses.replace(needs, held=held, peaks=peaks)


def auto(
    folder: Path,
    gib: float,
    engine: ToyEngineConfig | None = None,
    offload: Offload = Offload.AUTO,
    needs: frozenset[str] | None = None,
) -> MemoryPlan:
    """Plan a run whose backends can free their memory."""
    plugins = Plugins.load()
    config = compose(plugins, [*NEEDED, f"model.path={folder}"], job=Job.TRAIN).config
    plan = dataclasses.replace(make_plan(config, None, plugins, needs), offload=offload)
    config = dataclasses.replace(config, engine=engine or SureEngine(), rollout=NeedyRollout())
    return plan_memory(config, plan, gib)


@pytest.mark.parametrize("engine", [SureEngine, FreshGradients])
def test_auto_moves_what_does_not_fit_and_no_more(folder: Path, engine: type[SureEngine]) -> None:
    """85 % of 80 GiB hold everything but the cache beside training."""
    found = auto(folder, 80, engine())
    assert found.offload is Offload.AUTO
    assert table(found) == {
        "sampling": {"policy": 20, "rollout": 47},
        "log-probs": {"policy": 21, "rollout": 45},
        "training": {"policy": 60, "rollout": 5},
        "saving": {"policy": 20, "rollout": 45},
        "weight sync": {"policy": 21, "rollout": 45},
    }
    assert found.host_bytes == found.moved_bytes == 0, "no copy, only the cache is freed"
    text = render(found)
    assert "away in sampling: policy's grads\n" in text
    assert "away in training: rollout's kv_cache\n" in text


def test_auto_moves_the_cheapest_first(folder: Path) -> None:
    found = auto(folder, 60)
    assert table(found)["sampling"] == {"policy": 4, "rollout": 47}
    assert found.moved_bytes == 16 * GIB
    assert "copies: 16.0 GiB out and back in a step, about 0.8 s at 45 GB/s" in render(found)


def test_auto_counts_what_a_frozen_model_keeps_with_all_that_stays(folder: Path) -> None:
    """Beside 47 GiB of the rollout and 8 of weights, moments take 16, and the reference
    keeps a pass of 1.
    """
    needs = frozenset({"ref_logprobs"})
    found = {gib: table(auto(folder, gib / 0.85, needs=needs))["sampling"] for gib in (71.5, 72.5)}
    assert found[72.5] == {"policy": 20, "reference": 4, "rollout": 47}
    assert found[71.5] == {"policy": 4, "reference": 4, "rollout": 47}


def test_turns_of_a_phase_are_told_apart(folder: Path) -> None:
    said = render(auto(folder, 80, offload=Offload.TRUE, needs=frozenset({"ref_logprobs"})))
    assert "away in log-probs of policy: policy's grads, policy's optimizer, reference's" in said
    assert "away in log-probs of reference: policy's grads, policy's optimizer, policy's" in said
    assert "away in training: reference's params, rollout's kv_cache, rollout's weights\n" in said


def test_auto_moves_nothing_where_all_fits_and_all_where_little_is_known(folder: Path) -> None:
    roomy = auto(folder, 160)
    assert roomy.offload is Offload.FALSE and roomy.host_bytes == 0
    assert "nothing leaves its device" in render(roomy)
    assert auto(folder, 160, NeedyEngine()).offload is Offload.TRUE


@pytest.mark.parametrize("gib", [40, 55, 62, 70, 85, 100, 120])
def test_auto_fits_where_true_does(folder: Path, gib: float) -> None:
    (mine,) = auto(folder, gib).devices
    (true,) = auto(folder, gib, offload=Offload.TRUE).devices
    for row, least in zip(mine.turns, true.turns, strict=True):
        assert least.together <= row.together <= max(0.85 * gib * GIB, least.together), row.phase


def test_a_run_asks_for_what_the_plan_answers(folder: Path) -> None:
    """Phases of a run are those of the plan, or nothing would stay in them."""

    async def nothing(*_: object) -> int:
        return 0

    parts = {"policy": TRAINED, "rollout": GENERATING["rollout"]}
    holders = {r: Holder(p, nothing, nothing, nothing, nothing) for r, p in parts.items()}
    stays = stays_of(auto(folder, 80), holders)
    grads, cache = ("policy", Held.GRADS), ("rollout", Held.KV_CACHE)
    every = frozenset((role, part) for role, its in parts.items() for part in its)

    def stay(needs: Mapping[str, frozenset[Held]]) -> frozenset[tuple[str, Held]]:
        needed = frozenset((r, part) for r in parts for part in needs.get(r, ()))
        return needed | stays[needed]

    assert stay(GENERATING) == every - {grads}
    assert stay({"policy": TRAINED}) == every - {cache}
    assert stay(SYNCING) == stay({"policy": frozenset({Held.PARAMS})}) == every - {grads}


def test_a_rollout_starts_beside_what_it_samples_beside(folder: Path) -> None:
    """Also where a judge and a reward model work while it samples, which it starts
    without.
    """

    async def nothing(*_: object) -> int:
        return 0

    parts = {"policy": TRAINED, **GENERATING}
    holders = {r: Holder(p, nothing, nothing, nothing, nothing) for r, p in parts.items()}
    memory = auto(folder, 80)
    (device,) = memory.devices
    asked: set[tuple[str, Kind]] = {("reward_model", Part.PARAMS), ("judge", Memory.KV_CACHE)}
    rows = [
        dataclasses.replace(row, active=row.active | asked) if row.phase is Phase.SAMPLING else row
        for row in device.turns
    ]
    device = dataclasses.replace(device, turns=tuple(rows))
    stays = stays_of(dataclasses.replace(memory, devices=(device,)), holders)

    every = frozenset((role, part) for role, its in parts.items() for part in its)
    for role in ("rollout", "judge"):
        own = frozenset((role, part) for part in parts[role])
        assert own | stays[own] == every - {("policy", Held.GRADS)}


def test_too_little_host_memory_is_refused_before_a_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = auto(folder, 80)
    monkeypatch.setattr(process_memory, "free_bytes", lambda: memory.host_bytes)
    check_host(memory)
    monkeypatch.setattr(process_memory, "free_bytes", lambda: memory.host_bytes - 1)
    with pytest.raises(ConfigError, match=r"GiB of host memory .*\n  try:  offload=false"):
        check_host(memory)


def test_what_a_backend_is_told(folder: Path) -> None:
    planned(folder)
    engine, rollout = asked_of["engine"], asked_of["rollout"]
    assert engine.trains and not engine.model.frozen
    assert (engine.longest, engine.tokens) == (128, 8 * 128)
    assert engine.shape == {"hidden_size": 8}
    assert engine.device_bytes == 80 * GIB
    assert rollout.parameters == 2 * GIB, "of the policy's engine, which counts them"
    assert rollout.sequences == 8


def test_sampling_while_training_needs_both(folder: Path) -> None:
    both = table(planned(folder, "max_staleness=1"))["training"]
    assert both == {"policy": 60, "rollout": 47}


def test_engines_and_rollouts_on_devices_of_their_own(folder: Path) -> None:
    plan = planned(folder, "executor=ray", "ray.placement=disjoint")
    assert [device.roles for device in plan.devices] == [("policy",), ("rollout",)]
    assert table(plan, 0)["training"] == {"policy": 60}
    assert [device.most / GIB for device in plan.devices] == [60, 47]


def test_processes_keep_what_they_took(folder: Path) -> None:
    (device,) = planned(folder, "executor=ray").devices
    assert device.most / GIB == 60 + 47
    assert "each at its peak" in render(planned(folder, "executor=ray"))


def test_a_critic_trains_in_its_turn(folder: Path) -> None:
    """Its process keeps what it took then, although the policy's turn needs as much."""
    values = frozenset({"values"})
    (device,) = planned(folder, "critic.engine=toy", "executor=ray", needs=values).devices
    assert table(planned(folder, "critic.engine=toy", needs=values))["training"] == {
        "policy": 60,
        "critic": 28,
        "rollout": 45,
    }
    assert [device.peak(role) / GIB for role in device.roles] == [60, 60, 47]
    assert device.most / GIB == 60 + 60 + 47


@pytest.mark.parametrize("make", [Path.unlink, lambda path: path.write_text("{"), pipe])
def test_a_model_without_a_description_is_one_sentence(
    folder: Path, make: Callable[[Path], object]
) -> None:
    make(folder / "config.json")
    with pytest.raises(ConfigError, match=r"engine, has no config.json .*\n  try:  model.path="):
        planned(folder)


def test_what_it_says(folder: Path) -> None:
    text = render(planned(folder))
    assert "largest: training, 105.0 GiB" in text
    assert "32.0  policy: activations  (lower: engine.tokens=1)" in text
    assert "does not fit, 105.0 GiB of 80.0" in text
    assert "unknown: policy: its noise" in text
    room = render(planned(folder, gib=141))
    assert "fits but for what is unknown, 105.0 GiB of 141.0, 36.0 left" in room
    assert "on the CPU" in render(planned(folder, "ray.devices=cpu"))


def layers_of(
    folder: Path, gib: float, *overrides: str, needs: frozenset[str] | None = None, **parts: object
) -> tuple[dict[str, int], MemoryPlan]:
    """Return the layers that recompute, and the plan of a run of choosing engines."""
    plugins = Plugins.load()
    given = [*NEEDED, f"model.path={folder}", *overrides]
    config = compose(plugins, given, job=Job.TRAIN).config
    plan = dataclasses.replace(
        make_plan(config, None, plugins, needs), offload=parts.pop("offload", Offload.FALSE)
    )
    backends = {"engine": ChoosingEngine(), "rollout": NeedyRollout(), **parts}
    critic = dataclasses.replace(config.critic, engine=ChoosingEngine())
    config = dataclasses.replace(config, critic=critic, **backends)
    memory = plan_memory(config, plan, gib)
    with_numbers = with_recompute(config, memory)
    assert not leaves_recompute(with_numbers.engine)
    again = plan_memory(with_numbers, plan, gib)
    assert (again.recomputed, again.devices) == ({}, memory.devices), "the number is settled"
    return {role: found.layers for role, found in memory.recomputed.items()}, memory


def test_as_few_layers_recompute_as_fit_beside_what_stays(folder: Path) -> None:
    """Policy 28 GiB and rollout 45, of 85 % of a device."""
    found = {gib: layers_of(folder, gib)[0]["policy"] for gib in (80, 90, 100, 112, 124)}
    assert found == {80: 8, 90: 8, 100: 5, 112: 3, 124: 0}
    (device,) = layers_of(folder, 100)[1].devices
    assert device.training("policy") == (28 + 45 + 3 * 4) * GIB <= 85 * GIB


def test_what_leaves_its_device_is_room_for_activations(folder: Path) -> None:
    """Of the rollout 1 GiB is left there."""
    turns = layers_of(folder, 71, offload=Offload.TRUE)[0]
    assert turns == layers_of(folder, 71, offload=Offload.AUTO)[0] == {"policy": 1}


def test_engines_that_keep_what_they_took_choose_one_after_the_other(folder: Path) -> None:
    found, memory = layers_of(
        folder, 100, "critic.engine=toy", "executor=ray", needs=frozenset({"values"}),
        rollout=SmallRollout(),
    )  # fmt: skip
    assert found == {"policy": 2, "critic": 7}
    assert memory.devices[0].most <= 85 * GIB


@dataclasses.dataclass
class SmallRollout(ToyRolloutConfig):
    def memory_needs(self, asked: Asked) -> Needs:
        return Needs(held={Memory.WEIGHTS: (Term("weights", GIB),)})


def test_layers_recompute_where_little_is_known(folder: Path) -> None:
    found, memory = layers_of(folder, 500, rollout=ToyRolloutConfig())
    assert found == {"policy": 8}
    assert "policy: 8 of 8 layers recompute, since what is unknown may need" in render(memory)
    found, memory = layers_of(
        folder, 20, "executor=ray", "ray.placement=disjoint", rollout=ToyRolloutConfig()
    )
    assert found == {"policy": 8}
    assert "policy: 8 of 8 layers recompute, since fewer do not fit into" in render(memory)
    found, memory = layers_of(folder, 500, "ray.devices=cpu")
    assert found == {"policy": 8}
    assert "policy: 8 of 8 layers recompute, since the memory of a GPU is not" in render(memory)


def test_it_says_how_many_layers_recompute_and_why(folder: Path) -> None:
    some = "policy: 5 of 8 layers recompute, the fewest whose training fits into 85.0 GiB, 85% of"
    assert some in render(layers_of(folder, 100)[1])
    every = "policy: 8 of 8 layers recompute, since fewer do not fit into 68.0 GiB"
    assert every in render(layers_of(folder, 80)[1])


def test_a_backend_that_says_nothing_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *NEEDED, f"model.path={folder}", "--device-gib", "80"]) == 0
    text = capsys.readouterr().out
    assert "unknown: policy: toy does not say what memory it needs" in text
    assert "4 prompts x 2 samples" in text, "the plan comes first"


def test_mistakes(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="has no config"):
        planned(tmp_path / "nowhere")
    assert main(["plan", *NEEDED, f"model.path={folder}", "--device-gib=-1"]) == 2
    assert "--device-gib must be above 0 and below 1e+06, got -1." in capsys.readouterr().err
