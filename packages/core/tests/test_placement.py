"""Bundles, what a cluster lacks, what workers see of the environment, and
configurations that cross as plain values.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType

import pytest

from coupler.config.schema import Placement, RunConfig
from coupler.errors import PlacementError
from coupler.executors.environment import forwarded, of_ray
from coupler.executors.placement import Node, Role, make_shares, shortage
from coupler.interfaces import Model
from coupler.system.plain import RECEIVED, Section, from_plain, to_plain
from coupler.system.reads import track
from coupler.testing.toy_config import ToyAlgorithmConfig, ToyEngineConfig
from coupler.worker.spec import WorkerSpec

ROLES = [Role("policy", 4), Role("reference", 4), Role("rollout", 2)]


def node(name: str, cpus: float, gpus: float, free: float | None = None) -> Node:
    total = {"CPU": cpus, "GPU": gpus}
    return Node(name, total, total if free is None else {"CPU": cpus, "GPU": free})


def test_colocated_roles_share_bundles() -> None:
    (share,) = make_shares(ROLES, Placement.COLOCATED)
    assert (share.num_bundles, share.bundle(2, True)) == (4, {"CPU": 6.0, "GPU": 1.0})


def test_disjoint_rollouts_have_their_own() -> None:
    engines, rollouts = make_shares(ROLES, Placement.DISJOINT)
    assert (engines.num_bundles, engines.bundle(1, False)) == (4, {"CPU": 2.0})
    assert (rollouts.num_bundles, rollouts.bundle(1, True)) == (2, {"CPU": 1.0, "GPU": 1.0})


def test_a_replica_of_two_devices_takes_two_bundles() -> None:
    """Those of two ranks of the engine, or two of its own."""
    roles = [Role("policy", 4), Role("rollout", 2, devices=2)]
    (share,) = make_shares(roles, Placement.COLOCATED)
    assert share.num_bundles == 4
    assert [share.num_bundles for share in make_shares(roles, Placement.DISJOINT)] == [4, 4]


def test_what_fits_is_not_refused() -> None:
    assert (
        shortage(
            make_shares(ROLES, Placement.DISJOINT), 1, True, [node("a", 8, 4), node("b", 8, 2)]
        )
        == ""
    )


@pytest.mark.parametrize(
    ("placement", "nodes", "sentence"),
    [
        (
            Placement.DISJOINT,
            [node("a", 64, 2)],
            (
                "the run needs 6 GPUs (policy/reference 4 + rollout 2), the cluster has 2: node a "
                "2/2 free."
            ),
        ),
        (
            Placement.COLOCATED,
            [node("a", 64, 2), node("b", 64, 2, free=1)],
            (
                "the run needs 4 GPUs (policy/reference/rollout 4), the cluster has 4: node a 2/2 "
                "free, node b 1/2 free."
            ),
        ),
        (
            Placement.COLOCATED,
            [node("a", 8, 4)],
            (
                "the run needs 12 CPUs (policy/reference/rollout 12), the cluster has 8: node a "
                "8/8 free."
            ),
        ),
    ],
)
def test_what_does_not_fit_is_counted(
    placement: Placement, nodes: list[Node], sentence: str
) -> None:
    assert shortage(make_shares(ROLES, placement), 1, True, nodes).splitlines()[0] == sentence


def test_a_bundle_is_of_one_node() -> None:
    # 12 CPUs in all, but no node has 3
    halves = [node(name, 2, 8) for name in "abcdef"]
    assert "a bundle takes its share of one node" in shortage(
        make_shares(ROLES, Placement.COLOCATED), 1, False, halves
    )


def test_what_is_of_this_process_is_not_forwarded() -> None:
    ours = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "/ours",
        "RANK": "3",
        "RAY_AUTH_TOKEN": "x",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    given = forwarded(ours, own_interpreter=False, devices=("GPU-a", "GPU-b"))
    pinned = {
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }
    assert given == {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "/ours", **pinned}
    apart = forwarded(ours, own_interpreter=True, devices=())
    assert (apart["PYTHONPATH"], apart["PYTHONNOUSERSITE"], apart["CUDA_VISIBLE_DEVICES"]) == (
        "",
        "1",
        "",
    )


class Shape(StrEnum):
    FLAT = "very_flat"
    ROUND = "round"


@dataclass
class Inner:
    shapes: list[Shape] = field(default_factory=list)
    limit: Shape | None = None


@dataclass
class Outer:
    name: str = "outer"
    inner: Inner = field(default_factory=Inner)
    by_name: dict[str, Shape] = field(default_factory=dict)
    extra_args: dict[str, object] = field(default_factory=dict)


def test_configurations_survive_as_plain_values() -> None:
    config = Outer(
        inner=Inner([Shape.FLAT], Shape.ROUND),
        by_name={"a": Shape.FLAT},
        extra_args={"x": [1, {"y": None}]},
    )
    values = to_plain(config)
    assert (
        values["inner"] == {"shapes": ["very_flat"], "limit": "round"}
        and type(values["by_name"]["a"]) is str
    )
    made = from_plain(Outer, values)
    assert made == config and type(made.inner.limit) is Shape


def test_a_spec_crosses_without_classes_of_plugins_and_reports_what_is_read() -> None:
    config, reads = track(RunConfig(engine=ToyEngineConfig(lr=0.5), algorithm=ToyAlgorithmConfig()))
    spec = WorkerSpec("policy", "a:B", config.engine, Model("m"), ("c:D", config.algorithm))
    sent = pickle.dumps(spec)
    assert not reads.keys  # to send it is not to use it
    RECEIVED.keys.clear()
    there = pickle.loads(sent)
    assert there.engine_config.lr == 0.5 and there.algorithm[1].name == "toy"
    assert {"engine.lr", "algorithm.name"} == RECEIVED.keys
    assert isinstance(Section.of(config.engine).values, dict)


def test_ray_that_was_imported_without_its_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    early = ModuleType("ray")
    early.is_initialized = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", early)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(PlacementError, match="RAY_AUTH_MODE=token"), of_ray(starts=True):
        pytest.fail("it must not get here")


def test_a_rollout_of_evaluations_is_with_the_rollouts() -> None:
    roles = [Role("policy", 2), Role("rollout", 2), Role("eval_rollout", 1)]
    names = [
        [role.name for role in share.roles] for share in make_shares(roles, Placement.DISJOINT)
    ]
    assert names == [["policy"], ["rollout", "eval_rollout"]]
