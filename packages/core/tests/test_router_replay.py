"""Router replay: routes get from where they were recorded to every pass that replays
them, and to no other.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_run import ToyRun

from coupler.batch import Batch
from coupler.config.compose import compose
from coupler.config.schema import Job, RouterReplay, RunConfig, SamplingConfig
from coupler.conversation.packing import Sample, pack
from coupler.conversation.tree import Row as OnePath
from coupler.data import Prompt, Row
from coupler.engine_kit.inference.gated import Sampled
from coupler.errors import ConfigError, CouplerError
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import Completion, Loss, Model, Output, Rank, Request, StepInfo
from coupler.jobs.train import unreplayed
from coupler.loop.rollout_group import RolloutGroup
from coupler.metrics import Metrics
from coupler.plugins.manager import Plugins
from coupler.run.plan import make_plan
from coupler.testing.models import write_toy
from coupler.testing.toy import ToyAlgorithm, ToyEngine, ToyRollout
from coupler.testing.toy_config import ToyRolloutConfig
from coupler.worker.replica import RolloutSpec

LAYERS, TOPK = 3, 2
# what passes of the engine got to replay
SEEN: list[tuple[str, np.ndarray | None]] = []


class RoutedEngine(ToyEngine):
    """Says that token t of id i went to experts i and i + 1, and notes what it was
    told.
    """

    def forward(self, batch: Batch, want: tuple[Output, ...]) -> Batch:
        SEEN.append(("forward", batch.tokens.get("routed_experts")))
        done = super().forward(batch, tuple(o for o in want if o.name != "routed_experts"))
        if Output("routed_experts") not in want:
            return done
        routes = batch["tokens"][:, None, None] + np.arange(TOPK) + np.zeros((LAYERS, 1), int)
        return done.with_tokens(routed_experts=routes.astype(np.int16))

    def forward_backward(
        self, batch: Batch, want: tuple[Output, ...], loss: Loss, step: StepInfo
    ) -> Metrics:
        SEEN.append(("train", batch.tokens.get("routed_experts")))
        return super().forward_backward(batch, want, loss, step)


class RoutedRollout(ToyRollout):
    """Says that every token went to expert 7; the last one was never fed."""

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        if not request.routed_experts:
            return done
        routes = np.full((len(request.prompt) + len(done.tokens), LAYERS, TOPK), 7, np.int16)
        routes[-1] = -1
        return replace(done, routed_experts=routes)


class WantsOld(ToyAlgorithm):
    needs = frozenset({"old_logprobs"})


def run(folder: Path, mode: RouterReplay, steps: int) -> list[tuple[str, np.ndarray | None]]:
    """What the passes of one step got: the old log-probs', and one for each optimizer
    step.
    """
    SEEN.clear()
    config = RunConfig(
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=2,
        optimizer_steps_per_batch=steps,
        sampling=SamplingConfig(max_tokens=6),
        router_replay=mode,
    )
    here = "test_router_replay:"
    parts = {
        "engine": f"{here}RoutedEngine",
        "rollout": f"{here}RoutedRollout",
        "algorithm": f"{here}WantsOld",
    }
    ToyRun(folder, config, **parts).run()
    return SEEN[-1 - steps :] if steps > 1 else SEEN[-1:]


def test_r2_replays_what_the_pass_for_old_logprobs_recorded(tmp_path: Path) -> None:
    (name, before), *trained = run(tmp_path, RouterReplay.R2, 2)
    assert (name, before) == ("forward", None)
    for name, routes in trained:
        assert name == "train" and routes is not None and routes.shape[1:] == (LAYERS, TOPK)
        assert routes.dtype == np.int16 and (routes[..., 1] == routes[..., 0] + 1).all()


def test_r3_replays_what_the_rollout_did_in_every_pass_of_the_policy(tmp_path: Path) -> None:
    passes = run(tmp_path, RouterReplay.R3, 2)
    assert [name for name, _ in passes] == ["forward", "train", "train"]
    for _, routes in passes:
        assert routes is not None and set(np.unique(routes)) == {-1, 7}


@pytest.mark.parametrize("steps", [1, 2])
def test_disabled_replays_nothing(steps: int, tmp_path: Path) -> None:
    assert all(routes is None for _, routes in run(tmp_path, RouterReplay.DISABLED, steps))


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["router_replay=R2", "optimizer_steps_per_batch=2"], "router_replay=R2 needs engine=toy"),
        (["router_replay=R3"], "(?s)router_replay=R3 needs engine=toy.*or another engine"),
    ],
)
def test_a_plan_refuses_what_nobody_can_replay(overrides: list[str], what: str) -> None:
    plugins = Plugins.load()
    needed = [
        "engine=toy",
        "rollout=toy",
        "algorithm=toy",
        "model.path=/m",
        "data.source=x",
        "reward.target=a:b",
    ]
    needed += ["data.max_prompt_tokens=100"]
    config = compose(plugins, [*needed, *overrides], job=Job.TRAIN).config
    with pytest.raises(ConfigError, match=what):
        make_plan(config, None, plugins, frozenset({"old_logprobs"}))


def completion(**changes: Any) -> Completion:
    return replace(Completion((5, 6), (-1.0, -2.0), (0, 0), "stop"), **changes)


def packed(routes: np.ndarray) -> Batch:
    prompt = Prompt(Row(prompt="", answer="", index=0, extra={}), (1, 2, 3))
    path = OnePath.of_one_turn(prompt.ids, completion(routed_experts=routes))
    return pack([Sample(prompt, (path,), 1.0, "", "stop")], 0, 1, 1.0)


def test_routes_of_another_number_of_tokens_are_an_error() -> None:
    with pytest.raises(CouplerError, match="experts of 4 tokens for a prompt and completion of 5"):
        packed(np.zeros((4, LAYERS, TOPK), np.int8))


@pytest.mark.parametrize(
    "where", [(0,), (3,), (2, 1), (1, 0, 1)], ids=["prompt", "sampled", "one layer", "one expert"]
)
def test_only_the_last_token_may_have_no_routes(where: tuple[int, ...]) -> None:
    """The engine would leave the token to its router, where the rollout's may have sent
    it elsewhere.
    """
    routes = np.zeros((5, LAYERS, TOPK), np.int8)
    routes[-1] = -1
    np.testing.assert_array_equal(packed(routes)["routed_experts"], routes)
    routes[where] = -1
    with pytest.raises(CouplerError, match="experts of 1 of the 4 tokens that it was fed"):
        packed(routes)


class CutOff(RoutedRollout):
    """Aborts after two tokens; the second part of a completion went elsewhere."""

    calls = 0

    async def generate(self, request: Request) -> Completion:
        self.calls += 1
        first = self.calls == 1
        done = await super().generate(replace(request, max_tokens=2) if first else request)
        routes = done.routed_experts if first else done.routed_experts + 1
        routes[-1] = -1
        return replace(done, finish="abort" if first else "length", routed_experts=routes)


class Waiting(RoutedRollout):
    """Is cut off before it feeds the request, after two tokens, and once more before it
    feeds the rest.
    """

    parts = (0, 2, 0, 9)
    calls = 0

    async def generate(self, request: Request) -> Completion:
        tokens = self.parts[self.calls]
        self.calls += 1
        # Time for a pause.
        await asyncio.sleep(0.01)
        if tokens:
            done = await super().generate(replace(request, max_tokens=min(tokens, 4)))
            return replace(done, finish="length" if self.calls == 4 else "abort")
        return Completion((), (), (), "abort")


class Silent(ToyRollout):
    """Does not know of routes."""


def group_of(folder: Path, rollout: str) -> RolloutGroup:
    executor = Local(inline=True, waits=Waits(60.0, 60.0))
    model = Model(str(write_toy(folder / "model")))
    return RolloutGroup(executor, RolloutSpec(rollout, ToyRolloutConfig(), model), [Rank()])


async def sample(group: RolloutGroup) -> Completion:
    await group.setup()
    return await group.generate(Request((5, 6, 7), 6, routed_experts=True))


def test_a_completion_that_was_cut_off_keeps_the_routes_that_sampled_it(tmp_path: Path) -> None:
    done = asyncio.run(sample(group_of(tmp_path, "test_router_replay:CutOff")))
    assert len(done.tokens) == 6 and done.finish == "length"
    assert done.routed_experts[:, 0, 0].tolist() == [7] * 4 + [8] * 4 + [
        -1
    ]  # token 5 was fed in the second part only


def test_what_was_cut_off_before_it_was_fed_leaves_the_routes_of_the_rest(tmp_path: Path) -> None:
    group = group_of(tmp_path, "test_router_replay:Waiting")

    async def story() -> Completion:
        sampling = asyncio.ensure_future(sample(group))
        while not sampling.done():
            # As if a pause came between any two parts.
            group.pauses += 1
            await asyncio.sleep(0)
        return await sampling

    done = asyncio.run(story())
    assert (len(done.tokens), done.finish) == (6, "length")
    assert done.routed_experts[:, 0, 0].tolist() == [7] * 8 + [-1]


class Stayed:
    """Hold what one stay in an engine sampled, and the routes of what it was fed."""

    def __init__(self, tokens: int, fed: int, route: int) -> None:
        self.tokens, self.logprobs = [7] * tokens, [-1.0] * tokens
        self.routes = np.full((fed, 1, 2), route, np.int32)

    def each_version(self) -> list[int]:
        return [0] * len(self.tokens)

    def each_route(self) -> np.ndarray:
        return self.routes

    def each_mask(self) -> None:
        return None


def test_a_stay_that_was_never_fed_leaves_the_routes_of_others() -> None:
    done = Sampled()
    for stay in (Stayed(0, 0, 0), Stayed(2, 4, 5), Stayed(0, 0, 0), Stayed(1, 5, 6)):
        done.add(stay)
    found = done.completion(Request((5, 6, 7), 6, routed_experts=True), "length").routed_experts
    assert found[:, 0, 0].tolist() == [5, 5, 5, 5, 6, -1]


def test_a_rollout_that_does_not_say_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CouplerError, match="did not say"):
        asyncio.run(sample(group_of(tmp_path, "test_router_replay:Silent")))


@pytest.mark.parametrize(
    ("facts", "mode", "warns"),
    [
        ({"num_experts": 8}, RouterReplay.DISABLED, True),
        ({"n_routed_experts": 256, "num_experts": None}, RouterReplay.DISABLED, True),
        ({"num_experts": 8}, RouterReplay.R3, False),
        ({"model_type": "llama"}, RouterReplay.DISABLED, False),
    ],
)
def test_a_model_with_experts_and_no_replay_is_warned_of(
    facts: dict[str, Any], mode: RouterReplay, warns: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(facts))
    text = unreplayed(RunConfig(router_replay=mode), tmp_path)
    assert ("router_replay=R3" in text) == warns == bool(text)
