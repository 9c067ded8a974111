"""The loop with a critic on the toy backends: it judges, it warms up, it takes turns,
and what fails has a name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from toy_run import ToyRun

from coupler.batch import Batch
from coupler.config.schema import CriticConfig, Offload, RunConfig, SamplingConfig
from coupler.conversation.measures import describe_values
from coupler.errors import CouplerError
from coupler.interfaces import Algorithm, Columns, Controller, Head, Layout, Output, Part, Rank
from coupler.jobs.device_sharing import hold_state, hold_trained, start
from coupler.metrics import Metric, Metrics
from coupler.testing.models import write_toy
from coupler.testing.toy import ToyAlgorithm, ToyEngine
from coupler.testing.toy_config import ToyEngineConfig
from coupler.worker.torch.hf_export import export


class Squares(Algorithm):
    """Half the squared distance of values from returns."""

    want = (Output("values"),)

    def advantages(self, batch: Batch) -> Batch:
        return batch

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        return (out["values"] - batch["returns"]) ** 2 / 2, {}


class Judged(ToyAlgorithm):
    """REINFORCE with the critic as baseline: reward minus value on every sampled
    token.
    """

    needs = frozenset({"values"})
    critic = "test_critic:Squares"

    def advantages(self, batch: Batch) -> Batch:
        reward = batch.spread(batch["reward"])
        return batch.with_tokens(advantages=reward - batch["values"], returns=reward)


class BadCritic(Squares):
    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        return (out["values"] - batch["returns"]) * np.nan, {}


class JudgedBadly(Judged):
    critic = "test_critic:BadCritic"


class Halving(Controller):
    def __init__(self) -> None:
        self.value = 8.0

    def apply(self, batch: Batch) -> Batch:
        return batch.with_seqs(half=np.full(len(batch), self.value, np.float32))

    def update(self, batch: Batch) -> Metrics:
        self.value /= 2
        return {"half": Metric(float(batch["half"][0]))}

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]


class Controlled(ToyAlgorithm):
    def advantages(self, batch: Batch) -> Batch:
        assert batch.has("half")
        return super().advantages(batch)

    def controller(self) -> Controller:
        return Halving()


def config(**changes: Any) -> RunConfig:
    settings = {
        "steps": 4,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "sampling": SamplingConfig(max_tokens=8),
    }
    return RunConfig(**{**settings, **changes})


def trained(
    folder: Path, algorithm: str = "Judged", **changes: Any
) -> tuple[ToyRun, list[dict[str, float]]]:
    folder.mkdir(exist_ok=True)
    run = ToyRun(folder, config(**changes), algorithm=f"test_critic:{algorithm}")
    return run, run.run()


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_policy_and_critic_learn(tmp_path: Path, max_staleness: int) -> None:
    """The reward rises, and the critic, which starts at 0, comes to explain it. Inline,
    and in threads side by side.
    """
    _, log = trained(tmp_path, steps=40, max_staleness=max_staleness)
    first, last = log[1], log[-1]
    assert last["reward/mean"] > first["reward/mean"] + 0.2
    assert first["critic/values"] == 0.0
    assert last["critic/loss"] < first["critic/loss"] / 2
    assert abs(last["critic/values"] - last["critic/returns"]) < 0.2
    assert {"loss", "critic/grad_norm", "critic/lr", "critic/explained_variance"} <= last.keys()


def test_while_the_critic_warms_up_the_policy_stays(tmp_path: Path) -> None:
    run, log = trained(tmp_path, critic=CriticConfig(warmup_steps=2))
    assert [("loss" in step, "critic/loss" in step) for step in log[1:]] == [(False, True)] * 2 + [
        (True, True)
    ] * 2
    assert run.policy.steps_done == 2
    assert run.critic and run.critic.steps_done == 4


def test_the_critic_takes_steps_of_its_own_number(tmp_path: Path) -> None:
    run, _ = trained(
        tmp_path, optimizer_steps_per_batch=2, critic=CriticConfig(optimizer_steps_per_batch=8)
    )
    assert run.critic and (run.policy.steps_done, run.critic.steps_done) == (8, 32)
    (tmp_path / "same").mkdir()
    run, _ = trained(tmp_path / "same", optimizer_steps_per_batch=2)
    assert run.critic and (run.policy.steps_done, run.critic.steps_done) == (8, 8)


def test_a_critic_whose_gradient_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        CouplerError, match="the critic's gradient was not finite in 4 optimizer steps"
    ) as caught:
        trained(tmp_path, "JudgedBadly", steps=8)
    assert "a smaller critic.engine.lr, critic.engine.dtype=fp32" in str(caught.value)


def test_a_controllers_coefficient_is_in_force_for_one_step(tmp_path: Path) -> None:
    run, log = trained(tmp_path, "Controlled")
    assert [step["half"] for step in log[1:]] == [8.0, 4.0, 2.0, 1.0]
    assert run.trainer.controller and run.trainer.controller.state() == {"value": 0.5}


def test_on_a_shared_device_policy_and_critic_take_turns(tmp_path: Path) -> None:
    """offload=true: each trains with the other's memory gone; the rollout's weights
    survive a checkpoint of both.
    """
    run = ToyRun(tmp_path, config(offload=Offload.TRUE), algorithm="test_critic:Judged")
    held: dict[str, set[str]] = {"policy": set(), "critic": set()}
    inside: list[str] = []

    async def go() -> None:
        assert run.critic and run.policy.algorithm
        for group in (run.policy, run.critic):
            watch(group, held[group.spec.role], inside, held)
        await start(run.residency, run.weights, run.policy, run.critic)
        assert held == {"policy": set(), "critic": set()}, (
            "the rollout started with the device to itself"
        )
        for role, own in held.items():
            async with hold_trained(run.residency, role):
                assert own == {"params", "grads", "optimizer"}
        trainer = run.build(run.policy.algorithm)
        columns = {"values": np.float32, "advantages": np.float32, "returns": np.float32}
        batch = Batch(
            np.full(4, 5),
            {
                "tokens": np.full(20, 9, np.int32),
                "loss_mask": np.tile(np.arange(5) > 1, 4),
                **{name: np.zeros(20, dtype) for name, dtype in columns.items()},
            },
        )
        await trainer.train(batch, 1)
        for group in (run.policy, run.critic):
            async with hold_state(trainer.residency, group.spec.role):
                assert "weights" in trainer.residency.resident["rollout"]
                assert held[group.spec.role] >= {"params", "optimizer"}

    asyncio.run(go())
    assert inside == ["policy: critic holds nothing", "critic: policy holds nothing"]


def watch(group: Any, own: set[str], inside: list[str], held: dict[str, set[str]]) -> None:
    """Follow what an engine holds, and note when it trains what the other one does."""
    engine, role = group.ranks[0].of.engine, group.spec.role
    other = next(name for name in held if name != role)
    real, setup = engine.forward_backward, engine.setup

    def forward_backward(*arguments: Any) -> Metrics:
        assert own == {"params", "grads", "optimizer"}
        inside.append(f"{role}: {other} holds {', '.join(sorted(held[other])) or 'nothing'}")
        return real(*arguments)

    def set_up(rank: Rank) -> Layout:
        own.update(map(str, Part))
        return setup(rank)

    engine.setup = set_up
    engine.forward_backward = forward_backward
    engine.offload = lambda what: own.difference_update(map(str, what))
    engine.onload = lambda what: own.update(map(str, what))


def test_explained_variance_by_hand() -> None:
    """Returns 0, 2, 4 have variance 8 / 3; off by 1, 0, -1 leaves 2 / 3: a quarter is
    not explained.
    """
    found = describe_values(np.array([-1.0, 2.0, 5.0]), np.array([0.0, 2.0, 4.0]))
    assert found["critic/explained_variance"].value == pytest.approx(0.75)
    assert (found["critic/values"].value, found["critic/returns"].value) == (2.0, 2.0)
    assert describe_values(np.zeros(2), np.ones(2))["critic/explained_variance"].value == 0.0
    assert describe_values(np.zeros(0), np.zeros(0))["critic/values"].value == 0.0


def test_the_export_of_a_critic_has_the_score_and_no_head(tmp_path: Path) -> None:
    source = write_toy(tmp_path / "model")
    engine = ToyEngine(
        ToyEngineConfig(), replace(ToyRun(tmp_path, config()).model, head=Head.VALUE)
    )
    engine.setup(Rank())
    export(engine.weights(), tmp_path / "out", source, Head.VALUE, write=True)
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert set(file.keys()) == {"embed.weight", "score.weight", "score.bias"}
    assert '"id2label": {\n    "0": "value"\n  }' in (tmp_path / "out" / "config.json").read_text()
