"""RolloutGroup: replicas that share the requests, and one of them dying."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coupler.config.schema import SyncConfig
from coupler.conversation.episodes import OneTurn
from coupler.data import Prompt, Row
from coupler.errors import CouplerError, ReplicaDied, WaitTimeout
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import (
    Completion,
    InFlight,
    Memory,
    Model,
    Rank,
    Request,
    SyncReceipt,
    WeightUpdate,
)
from coupler.jobs.judging import JudgeReplicas
from coupler.loop.device_memory import Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.rollout_group import MAX_RESTARTS, RolloutGroup
from coupler.loop.routing import FULLER
from coupler.loop.sampler import Scorer
from coupler.loop.weight_sync import StreamShardingManager
from coupler.plugins.manager import Plugins
from coupler.rewards import Scored
from coupler.testing.models import write_toy
from coupler.testing.toy import ToyRollout
from coupler.testing.toy_config import ToyEngineConfig, ToyRolloutConfig
from coupler.worker.replica import RolloutSpec
from coupler.worker.spec import WorkerSpec


class MortalRollout(ToyRollout):
    """Dies when told to, with everything it is sampling; ``setup`` brings it back."""

    dead = False
    dies_in = ""  # this method, once
    late_s = 0.0  # before it receives
    starts = 0
    closed = False

    async def setup(self, rank: Rank) -> int:
        self.dead, self.came = False, []
        self.starts += 1
        self.check("setup")
        return await super().setup(rank)

    def close(self) -> None:
        self.closed = True

    async def generate(self, request: Request) -> Completion:
        self.check()
        self.came.append(request)
        done = await super().generate(request)
        self.check()
        return done

    async def pause(self, in_flight: InFlight) -> None:
        self.check("pause")
        await super().pause(in_flight)

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        if (
            self.dies_in == "update, half way"
        ):  # in a thread of its own: the sender is served meanwhile
            received = update.receive(Rank())
            await asyncio.to_thread(next, received)
            received.close()
            self.dies_in, self.dead = "", True
        self.check("update")
        await asyncio.sleep(self.late_s)
        return await asyncio.to_thread(
            asyncio.run, super().update(update)
        )  # several receive at once

    async def wake(self, what: frozenset[Memory]) -> None:
        self.check("wake")
        await super().wake(what)

    def check(self, method: str = "") -> None:
        if method and method == self.dies_in:
            self.dies_in, self.dead = "", True
        if self.dead:
            raise ReplicaDied("it died.")


def make_group(folder: Path, count: int) -> RolloutGroup:
    executor = Local(inline=True, waits=Waits(60.0, 60.0))
    ranks = [Rank(index=i, world=count) for i in range(count)]
    model = Model(str(write_toy(folder / "model")))
    spec = RolloutSpec("test_rollouts:MortalRollout", ToyRolloutConfig(), model)
    return RolloutGroup(executor, spec, ranks)


def replica(group: RolloutGroup, index: int) -> Any:
    return group.replicas[index].of


def requests(count: int, **more: Any) -> list[Request]:
    return [Request((5, 6 + i), 20, seed=i, **more) for i in range(count)]


def test_requests_of_a_dead_replica_go_elsewhere(tmp_path: Path) -> None:
    """Each request gives one completion, the one that an undisturbed group gives."""

    async def story(kill: bool) -> list[Completion]:
        group = make_group(tmp_path / str(kill), 2)
        await group.setup()
        running = [asyncio.ensure_future(group.generate(r)) for r in requests(8)]
        await asyncio.sleep(0.001)
        assert all(n > 0 for n in group.router.outstanding)
        replica(group, 0).dead = kill
        done = await asyncio.gather(*running)
        assert group.router.outstanding == [0, 0]
        assert group.dead == ({0} if kill else set())
        assert group.num_receivers == (1 if kill else 2)
        return done

    assert asyncio.run(story(True)) == asyncio.run(story(False))


def test_a_dead_replica_is_started_before_the_next_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        group = make_group(tmp_path, 2)
        await group.setup()
        replica(group, 1).dead = True  # while idle: the pause notices
        await group.pause(InFlight.DRAIN)
        await group.revive(InFlight.DRAIN)
        assert (group.num_receivers, group.dead, replica(group, 1).starts) == (2, set(), 2)
        waiting = asyncio.ensure_future(replica(group, 1).generate(requests(1)[0]))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "what was started again waits for weights too"
        await group.all("resume")
        assert len((await waiting).tokens) == 20

    asyncio.run(story())
    assert "rollout replica 1 died; starting it again" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["setup", "pause"])
def test_a_replica_that_dies_while_it_starts_again_is_started_once_more(
    tmp_path: Path, method: str
) -> None:
    async def story() -> None:
        group = make_group(tmp_path, 2)
        await group.setup()
        replica(group, 1).dead = True
        await group.pause(InFlight.DRAIN)
        replica(group, 1).dies_in = method
        await group.revive(InFlight.DRAIN)
        assert (group.num_receivers, group.dead, replica(group, 1).starts) == (2, set(), 3)

    asyncio.run(story())


@pytest.mark.parametrize("count", [1, 2])
def test_a_dead_judge_is_started_before_the_next_verdict(tmp_path: Path, count: int) -> None:
    """No weight sync comes that would do it."""

    async def story() -> None:
        group = make_group(tmp_path, count)
        await group.setup()
        judge = JudgeReplicas(group)
        whole = await asyncio.gather(*map(judge.generate, requests(4)))
        replica(group, 0).dead = True
        again = await asyncio.gather(*map(judge.generate, requests(4)))
        assert [done.tokens for done in again] == [done.tokens for done in whole]
        await judge.generate(requests(1)[0])
        assert (group.dead, replica(group, 0).starts) == (set(), 2)

    asyncio.run(story())


def test_a_session_moves_when_its_replica_dies(tmp_path: Path) -> None:
    async def story() -> None:
        group = make_group(tmp_path, 2)
        await group.setup()
        await group.generate(requests(1, session="talk")[0])
        first = group.router.sessions["talk"].replica
        for request in requests(3, session="talk"):
            await group.generate(request)
            assert group.router.sessions["talk"].replica == first
        replica(group, first).dead = True
        await group.generate(requests(1, session="talk")[0])
        assert group.router.sessions["talk"].replica == 1 - first

    asyncio.run(story())


class AsItIs:
    """A codec, and rewards."""

    takes_group = False

    def decode(self, ids: tuple[int, ...]) -> str:
        return str(ids)

    async def score(self, *_: Any) -> list[Scored]:
        return [Scored(result=1.0, seconds=0.0)]


@pytest.mark.parametrize(
    ("groups", "count", "together"), [(64, 4, True), (9, 4, False), (2, 4, False), (3, 1, True)]
)
def test_samples_of_one_prompt_meet_on_one_replica(
    tmp_path: Path, groups: int, count: int, together: bool
) -> None:
    """Where all replicas have as much to do; and what it takes to know them is
    forgotten with them.
    """

    async def story() -> None:
        group = make_group(tmp_path, count)
        await group.setup()
        scorer = Scorer(group, AsItIs(), AsItIs(), OneTurn(group, ()))  # type: ignore[arg-type]
        prompts = [Prompt(Row(str(i), "", i, {}), (5, 6 + i)) for i in range(groups)]
        running = [
            asyncio.ensure_future(scorer.sample(p, list(range(8)), Request((), 20), groups=groups))
            for p in prompts
        ]
        # Replicas that keep a group whole compute its prompt once.
        cost = 22 + 7 * 20 if together else 22 * 8
        while sum(group.router.outstanding) < cost * groups:
            await asyncio.sleep(0)
        assert max(group.router.outstanding) * count <= FULLER * sum(group.router.outstanding)
        await asyncio.gather(*running)
        assert not group.router.sessions
        came = [{r.prompt for r in replica(group, i).came} for i in range(count)]
        assert (sum(map(len, came)) == groups) == together

    asyncio.run(story())


def test_the_last_replica_s_death_is_an_error(tmp_path: Path) -> None:
    async def story() -> None:
        group = make_group(tmp_path, 1)
        await group.setup()
        replica(group, 0).dead = True
        with pytest.raises(ReplicaDied, match="it died"):
            await group.generate(requests(1)[0])

    asyncio.run(story())


def test_a_replica_that_keeps_dying_stops_the_run(tmp_path: Path) -> None:
    async def story() -> None:
        group = make_group(tmp_path, 2)
        await group.setup()
        for _ in range(MAX_RESTARTS):
            replica(group, 0).dead = True
            await group.pause(InFlight.DRAIN)
            await group.revive(InFlight.DRAIN)
            await group.all("resume")
        replica(group, 0).dead = True
        await group.pause(InFlight.DRAIN)
        with pytest.raises(ReplicaDied, match="replica 0 died 4 times"):
            await group.revive(InFlight.DRAIN)

    asyncio.run(story())


def test_a_run_that_ends_closes_its_rollouts(tmp_path: Path) -> None:
    """What they started, an engine's processes say, does not outlive it."""
    group = make_group(tmp_path, 2)
    assert [replica(group, i).closed for i in range(2)] == [False, False]
    group.executor.close()
    assert [replica(group, i).closed for i in range(2)] == [True, True]


def test_requests_go_to_the_fewest_outstanding_tokens(tmp_path: Path) -> None:
    async def story() -> None:
        group = make_group(tmp_path, 2)
        await group.setup()
        long = asyncio.ensure_future(group.generate(Request((5,), 300)))
        await asyncio.sleep(0)
        short = [asyncio.ensure_future(group.generate(r)) for r in requests(10)]
        await asyncio.sleep(0)
        assert group.router.outstanding == [301, 220]
        await asyncio.gather(long, *short)

    asyncio.run(story())


def make_edge(group: RolloutGroup, transport: str) -> StreamShardingManager:
    engine = Plugins.load().get("engine", "toy").target
    model = Model(str(write_toy(Path(group.replicas[0].of.model.path))))
    spec = WorkerSpec("policy", engine, ToyEngineConfig(), model, None)
    return StreamShardingManager(
        SyncConfig(deadline_s=20.0),
        engine=EngineGroup(group.executor, spec, [Rank()]),
        rollouts=group,
        weight_format="full",
        transport=Plugins.load().get("transport", transport).target,
        probe_prompt=(5, 6),
        temperature=1.0,
        residency=Residency({}, shared=False),
        in_flight=InFlight.DRAIN,
    )


@pytest.mark.parametrize("transport", ["tcp", "disk"])
@pytest.mark.parametrize("when", ["update", "update, half way"])
@pytest.mark.parametrize(("count", "late_s"), [(1, 0.0), (2, 0.0), (2, 0.3)])
def test_a_replica_that_dies_in_a_sync_gets_the_weights_when_it_is_back(
    tmp_path: Path, count: int, late_s: float, when: str, transport: str
) -> None:
    """Also before it came to the sender, which waits for it; the others get them once
    more, if they come late too.
    """

    async def story() -> None:
        group = make_group(tmp_path, count)
        edge = make_edge(group, transport)
        await edge.engine.setup()
        await edge.setup()
        await edge.sync(0)
        (want,) = {await replica(group, i).generate(requests(1)[0]) for i in range(count)}
        replica(group, 0).dies_in, replica(group, count - 1).late_s = when, late_s
        await edge.sync(1)
        assert (group.dead, replica(group, 0).starts) == (set(), 2)
        for i in range(count):
            done = await replica(group, i).generate(requests(1)[0])
            assert (done.tokens, set(done.versions)) == (want.tokens, {1})

    asyncio.run(asyncio.wait_for(story(), 15.0))


def test_a_replica_that_dies_while_it_wakes_is_back_at_the_sync(tmp_path: Path) -> None:
    async def story() -> None:
        group = make_group(tmp_path, 1)
        edge = make_edge(group, "tcp")
        await edge.engine.setup()
        await edge.setup()
        await edge.sync(0)
        await group.tell("sleep", frozenset(Memory))
        replica(group, 0).dies_in = "wake"
        await group.tell("wake", frozenset({Memory.WEIGHTS}))
        assert group.dead == {0}
        with pytest.raises(ReplicaDied, match="no rollout replica is left: it died"):
            await group.generate(requests(1)[0])
        await edge.sync(1)
        assert set((await group.generate(requests(1)[0])).versions) == {1}

    asyncio.run(asyncio.wait_for(story(), 15.0))


class Repeats(ToyRollout):
    async def generate(self, request: Request) -> Completion:
        return replace(await super().generate(request), finish="repetition")  # type: ignore[arg-type]


class Loses(ToyRollout):
    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        return replace(done, logprobs=done.logprobs[1:])


class Aborts(ToyRollout):
    async def generate(self, request: Request) -> Completion:
        return replace(await super().generate(request), finish="abort")


LOST = r"a rollout returned 3 log-probs and 4 versions of 4 tokens"
NO_END = "ended a request with 'repetition', which is none of stop, length, abort"


@pytest.mark.parametrize(
    ("rollout", "asked", "what"),
    [
        ("Loses", "generate", LOST),
        ("Loses", "sample_on_each", LOST),
        ("Repeats", "generate", NO_END),
        ("Repeats", "sample_on_each", NO_END),
        ("Aborts", "generate", "cut a request off without a pause"),
    ],
)
def test_an_answer_that_is_none_is_an_error(
    tmp_path: Path, rollout: str, asked: str, what: str
) -> None:
    executor = Local(inline=True, waits=Waits(60.0, 60.0))
    model = Model(str(write_toy(tmp_path)))
    spec = RolloutSpec(f"test_rollouts:{rollout}", ToyRolloutConfig(), model)
    group = RolloutGroup(executor, spec, [Rank()])

    async def story() -> None:
        await group.setup()
        await getattr(group, asked)(Request((5, 6), 4))

    with pytest.raises(CouplerError, match=what):
        asyncio.run(story())


class CutsOff(ToyRollout):
    """Aborts after eight tokens."""

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(replace(request, max_tokens=min(request.max_tokens, 8)))
        return replace(done, finish="abort" if request.max_tokens > 8 else "length")


def test_the_rest_of_a_completion_draws_random_numbers_of_its_own(tmp_path: Path) -> None:
    """Where every token is as likely, the same numbers would give the same tokens."""
    executor = Local(inline=True, waits=Waits(60.0, 60.0))
    model = Model(str(write_toy(tmp_path)))
    spec = RolloutSpec("test_rollouts:CutsOff", ToyRolloutConfig(), model)
    group = RolloutGroup(executor, spec, [Rank()])

    async def story() -> Completion:
        await group.setup()
        return await group.generate(Request((5, 6), 16, temperature=1e6, seed=3))

    tokens = asyncio.run(story()).tokens
    assert len(tokens) == 16 and tokens[:8] != tokens[8:]


class Silent(ToyRollout):
    async def generate(self, request: Request) -> Completion:
        return await asyncio.get_running_loop().create_future()


class Stuck(ToyRollout):
    async def generate(self, request: Request) -> Completion:
        time.sleep(60)
        return await super().generate(request)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("rollout", ["Silent", "Stuck"])
def test_a_rollout_that_never_answers_ends_at_the_deadline(
    tmp_path: Path, inline: bool, rollout: str
) -> None:
    """One that waits for what never comes; and one that blocks its thread, where it has
    one of its own.
    """
    if inline and rollout == "Stuck":
        pytest.skip("it blocks the only thread there is, which the heartbeat says")
    executor = Local(inline=inline, waits=Waits(0.5, 60))
    model = Model(str(write_toy(tmp_path)))
    spec = RolloutSpec(f"test_rollouts:{rollout}", ToyRolloutConfig(), model)
    group = RolloutGroup(executor, spec, [Rank()])

    async def story() -> None:
        await group.setup()
        with pytest.raises(
            WaitTimeout, match=r"waited 0\.5 s for generate of rollout \[0\]\.\n.*waits\.deadline_s"
        ):
            await group.generate(Request((5, 6), 4))

    start = time.monotonic()
    asyncio.run(story())
    executor.close()
    assert time.monotonic() - start < 10
