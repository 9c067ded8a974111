"""Adapters that travel apart: the weights beneath them once, then A and B; and a proof
that finds who ignores them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coupler.config.compose import compose
from coupler.config.schema import SyncConfig
from coupler.engine_kit.lora_names import names_of, partner, random_like
from coupler.errors import ConfigError, ReplicaDied, WeightSyncError
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import (
    InFlight,
    Layout,
    Memory,
    Model,
    Named,
    Rank,
    SyncReceipt,
    WeightUpdate,
)
from coupler.loop.device_memory import Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.rollout_group import RolloutGroup
from coupler.loop.weight_sync import StreamShardingManager
from coupler.plugins.backend import Backend
from coupler.plugins.manager import Plugins
from coupler.testing.models import write_toy
from coupler.testing.toy import ToyEngine, ToyRollout
from coupler.testing.toy_config import ToyEngineConfig, ToyRolloutConfig
from coupler.worker.replica import RolloutSpec
from coupler.worker.spec import WorkerSpec

HEAD = "head.weight"
A, B = names_of(HEAD)
RANK = 2


class AdaptedEngine(ToyEngine):
    """Its head is adapted; ``B`` is 0 at the start, and tests set it in place of
    training.
    """

    def setup(self, rank: Rank) -> Layout:
        layout = super().setup(rank)
        self.base = {name: tensor.copy() for name, tensor in self.params.items()}
        rows, columns = self.base[HEAD].shape
        self.a, self.b = np.full((RANK, columns), 0.3), np.zeros((rows, RANK))
        return layout

    def move(self, seed: int) -> None:
        self.b = np.random.default_rng(seed).normal(0, 1, self.b.shape)
        self.params[HEAD] = self.base[HEAD] + self.b @ self.a

    def base_weights(self) -> Iterator[Named]:
        return ((name, tensor.astype(np.float32)) for name, tensor in self.base.items())

    def adapter_weights(self) -> Iterator[Named]:
        return iter([(A, self.a.astype(np.float32)), (B, self.b.astype(np.float32))])


class AdaptedRollout(ToyRollout):
    """Runs an adapter of its head."""

    base: dict[str, np.ndarray] | None = None
    dies = False
    ignores = ""  # "base" or "adapter"

    async def setup(self, rank: Rank) -> int:
        self.base, self.seen = None, []
        return await super().setup(rank)

    async def holds_base(self) -> bool:
        return self.base is not None

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        self.seen.append("adapter" if update.adapter else "base")
        if self.dies and update.adapter:
            self.dies = False
            raise ReplicaDied("it died.")
        kept = dict(self.weights)
        if not update.adapter:
            receipt = await super().update(update)
            self.base = dict(self.weights)
        else:
            assert self.base is not None
            parts = {name: np.array(tensor, np.float64) for name, tensor in update.receive(Rank())}
            self.weights = {**self.base, HEAD: self.base[HEAD] + parts[B] @ parts[A]}
            self.version, size = update.version, sum(t.size * 4 for t in parts.values())
            receipt = SyncReceipt(update.version, len(parts), len(parts), size)
        if self.seen[-1] == self.ignores and len(self.seen) > 1:
            self.weights = kept
            self.base = self.base if update.adapter else kept
        return receipt

    async def sleep(self, what: frozenset[Memory]) -> None:
        if Memory.WEIGHTS in what:
            self.base = None


def make_edge(folder: Path, count: int = 1) -> StreamShardingManager:
    executor, model = (
        Local(inline=True, waits=Waits(60.0, 60.0)),
        Model(str(write_toy(folder / "model"))),
    )
    ranks = [Rank(index=i, world=count) for i in range(count)]
    spec = WorkerSpec("policy", "test_adapters:AdaptedEngine", ToyEngineConfig(), model, None)
    return StreamShardingManager(
        SyncConfig(deadline_s=20.0),
        engine=EngineGroup(executor, spec, [Rank()]),
        rollouts=RolloutGroup(
            executor,
            RolloutSpec("test_adapters:AdaptedRollout", ToyRolloutConfig(), model),
            ranks,
        ),
        weight_format="lora",
        transport=Plugins.load().get("transport", "disk").target,
        probe_prompt=(5, 6),
        temperature=1.0,
        residency=Residency({}, shared=False),
        in_flight=InFlight.DRAIN,
    )


async def ready(edge: StreamShardingManager) -> tuple[Any, list[Any]]:
    """Set both sides up; return the engine and the replicas."""
    await edge.engine.setup()
    await edge.setup()
    return edge.engine.ranks[0].of.engine, [handle.of for handle in edge.rollouts.replicas]


def told(story: Any) -> None:
    asyncio.run(asyncio.wait_for(story(), 20.0))


def test_the_weights_travel_at_the_start_and_adapters_after(tmp_path: Path) -> None:
    async def story() -> None:
        edge = make_edge(tmp_path, count=2)
        engine, replicas = await ready(edge)
        found = await edge.prove()
        assert found["sync/probe"].value < 1e-6
        assert found["sync/probe_permuted"].value > 0.1 and found["sync/probe_adapter"].value > 0.1
        for replica in replicas:
            assert replica.seen == [
                "base",
                "base",
                "adapter",
                "adapter",
            ]  # permuted, true, random, true
        for version in range(1, 4):
            engine.move(version)
            synced = await edge.sync(version)
            assert synced["sync/tensors"].value == 2
            assert synced["sync/bytes"].value == 4 * (engine.a.size + engine.b.size)
            assert (await edge.probe())["sync/probe"].value < 1e-6
        assert Counter(replicas[0].seen) == {"base": 2, "adapter": 5}

    told(story)


@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        ("adapter", "a push of a random adapter left the rollout's log-probs within"),
        ("base", "differ from the engine's"),
    ],
)
def test_a_rollout_that_ignores_what_it_says_it_loaded_is_found(
    tmp_path: Path, ignored: str, message: str
) -> None:
    """The adapter is 0 before the first step: every log-prob would be right, and stay
    as it is for ever.
    """

    async def story() -> None:
        edge = make_edge(tmp_path)
        _, (replica,) = await ready(edge)
        replica.ignores = ignored
        with pytest.raises(WeightSyncError, match=message):
            await edge.prove()

    told(story)


def test_weights_that_slept_go_ahead_of_the_next_adapter(tmp_path: Path) -> None:
    async def story() -> None:
        edge = make_edge(tmp_path, count=2)
        engine, replicas = await ready(edge)
        await edge.prove()
        for part, sent in ((Memory.KV_CACHE, ["adapter"]), (Memory.WEIGHTS, ["base", "adapter"])):
            for replica in replicas:
                replica.seen.clear()
            await edge.rollouts.pause(InFlight.DRAIN)
            await edge.rollouts.tell("sleep", frozenset({part}))
            await edge.rollouts.tell("wake", frozenset({part}))
            engine.move(7)
            await edge.sync(1)
            assert [replica.seen for replica in replicas] == [sent, sent]
            assert (await edge.probe())["sync/probe"].value < 1e-6

    told(story)


def test_a_replica_that_died_gets_the_weights_again(tmp_path: Path) -> None:
    """It dies while the adapter comes: the others, which hold the weights, get
    everything once more with it.
    """

    async def story() -> None:
        edge = make_edge(tmp_path, count=2)
        engine, replicas = await ready(edge)
        await edge.prove()
        replicas[1].seen.clear()
        replicas[0].dies = True
        engine.move(1)
        await edge.sync(1)
        assert replicas[0].seen == ["base", "adapter"]
        assert replicas[1].seen[-2:] == ["base", "adapter"]
        assert (await edge.probe())["sync/probe"].value < 1e-6

    told(story)


def test_without_the_self_test_the_weights_still_come_first(tmp_path: Path) -> None:
    async def story() -> None:
        edge = make_edge(tmp_path)
        edge.config.self_test = False
        _, (replica,) = await ready(edge)
        await edge.prove()
        assert replica.seen == ["base", "adapter"]

    told(story)


def test_names_are_pefts() -> None:
    a, b = names_of("model.layers.0.mlp.up_proj.weight")
    assert a == "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    assert b == "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    assert (partner(a), partner(b)) == (b, a)


def test_random_adapters_are_equal_on_every_rank_and_far_from_zero() -> None:
    a, b = np.zeros((8, 128), np.float32), np.zeros((64, 8), np.float32)
    drawn = {name: random_like(name, tensor) for name, tensor in ((A, a), (B, b))}
    assert all(np.array_equal(tensor, random_like(name, tensor)) for name, tensor in drawn.items())
    assert drawn[A].dtype == np.float32
    x = np.random.default_rng(0).normal(0, 1, 128)
    assert 0.2 < np.std(drawn[B] @ drawn[A] @ x) < 0.5


FORMATS = {"weights:full", "weights:lora"}


@pytest.mark.parametrize(
    ("engine", "rollout", "chosen"),
    [
        (FORMATS, FORMATS, "lora"),
        (FORMATS, {"weights:full"}, "full"),
        ({"weights:full"}, FORMATS, "full"),
    ],
)
def test_adapters_travel_apart_where_both_sides_can(
    engine: set[str], rollout: set[str], chosen: str
) -> None:
    plugins = Plugins.load()
    sides = {
        kind: Backend(kind=kind, name="x", target="", config=config, capabilities=frozenset(able))
        for kind, config, able in (
            ("engine", ToyEngineConfig, engine),
            ("rollout", ToyRolloutConfig, rollout),
        )
    }
    config = compose(plugins, NEEDED).config
    transports = plugins.of("transport")
    assert (
        plugins.call("coupler_weight_path", **sides, transports=transports, config=config)[0]
        == chosen
    )


NEEDED = [
    "engine=toy", "rollout=toy", "algorithm=toy", "model.path=/m", "data.source=x.jsonl",
    "reward.target=a:b",
]  # fmt: skip


@pytest.mark.parametrize(
    ("trained", "limit", "sentence"),
    [
        (
            ("rank", 0),
            8,
            (
                "rollout.room=8 is for an adapter, and engine=toy trains none: set engine.rank "
                "above 0, or "
            ),
        ),
        (
            ("", 0),
            8,
            "rollout.room=8 is for an adapter, and engine=toy trains none: set rollout.room=0.",
        ),
        (
            ("rank", 16),
            8,
            "engine.rank=16 is more than rollout.room=8 has room for: set rollout.room=16, or 0",
        ),
        (("rank", 8), 8, ""),
        (("rank", 16), 0, ""),
        (("", 0), 0, ""),
    ],
)
def test_an_adapter_without_room_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, trained: tuple[str, int], limit: int, sentence: str
) -> None:
    monkeypatch.setattr(ToyEngineConfig, "adapter_rank", trained)
    monkeypatch.setattr(ToyRolloutConfig, "adapter_limit", ("room", limit))
    if not sentence:
        compose(Plugins.load(), NEEDED)
        return
    with pytest.raises(ConfigError) as refused:
        compose(Plugins.load(), NEEDED)
    assert sentence in str(refused.value)
