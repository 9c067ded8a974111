"""The loop on the toy backends: it learns, it is deterministic, and it finds what would
be wrong silently.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from toy_run import REWARD, ToyRun, small

from coupler.config.schema import Placement, SamplingConfig
from coupler.errors import CouplerError, RewardError, WaitTimeout, WeightSyncError
from coupler.interfaces import (
    Completion,
    InFlight,
    Rank,
    Request,
    SyncReceipt,
    WeightUpdate,
    open_transport,
)
from coupler.jobs.device_sharing import start
from coupler.jobs.evaluation import Evaluation
from coupler.loop.buffer import Buffer
from coupler.loop.engine_group import EngineGroup
from coupler.loop.state import State
from coupler.metrics import Metric
from coupler.rewards import RewardPool
from coupler.testing.models import read_tensors, rewrite
from coupler.testing.toy import ToyAlgorithm, ToyEngine, ToyRollout, log_softmax


def numbers(log: list[dict[str, float]]) -> list[dict[str, float]]:
    """What may not differ between two runs."""
    return [{k: v for k, v in step.items() if not k.startswith("time/")} for step in log]


def test_reward_rises(tmp_path: Path) -> None:
    log = ToyRun(tmp_path, small(steps=25)).run()
    assert log[-1]["reward/mean"] > log[1]["reward/mean"] + 0.2
    assert all(step["train_infer/abs_diff"] < 1e-5 for step in log[1:])
    assert log[0]["sync/probe"] < 1e-5 < 1e-2 < log[0]["sync/probe_permuted"]


def test_two_runs_are_equal(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (numbers(ToyRun(tmp_path / name, small()).run()) for name in "ab")
    assert first == second


# no other field is read
APART: Any = SimpleNamespace(placement=Placement.DISJOINT)


def test_rollouts_with_devices_of_their_own_start_while_engines_do(tmp_path: Path) -> None:
    """The engine waits here until the rollout has begun, and the transport until the
    engine is there.
    """
    run, began = ToyRun(tmp_path, small()), asyncio.Event()
    load, sample = run.policy.setup, run.rollouts.setup

    async def engine() -> None:
        await asyncio.wait_for(began.wait(), 10)
        await asyncio.sleep(0.05)
        await load()

    async def rollout() -> None:
        began.set()
        await sample()

    run.policy.setup, run.rollouts.setup = engine, rollout  # type: ignore[method-assign]
    asyncio.run(start(run.residency, run.weights, run.policy, plan=APART))
    assert len(run.weights.endpoints) == 1


def test_rollouts_prepare_before_engines_load(tmp_path: Path) -> None:
    run, order = ToyRun(tmp_path, small()), []
    (handle,), load = run.rollouts.replicas, run.policy.setup
    replica, serve = handle.of, handle.of.setup

    async def prepare(rank: Rank) -> None:
        order.append(("prepare", rank.world))

    async def engine() -> None:
        order.append(("load", 0))
        await load()

    async def setup(rank: Rank) -> int:
        order.append(("setup", rank.world))
        return await serve(rank)

    run.policy.setup = engine  # type: ignore[method-assign]
    replica.prepare, replica.setup = prepare, setup
    asyncio.run(start(run.residency, run.weights, run.policy))
    assert order == [("prepare", 1), ("load", 0), ("setup", 1)]


def test_an_engine_that_fails_ends_the_start_of_the_others(tmp_path: Path) -> None:
    run, ended = ToyRun(tmp_path, small()), []

    async def engine() -> None:
        await asyncio.sleep(0.05)
        raise CouplerError("no such model")

    async def rollout() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("rollout")

    run.policy.setup, run.rollouts.setup = engine, rollout  # type: ignore[method-assign]
    with pytest.raises(CouplerError, match="no such model"):
        asyncio.run(start(run.residency, run.weights, run.policy, plan=APART))
    assert ended == ["rollout"]


def test_seeds_differ(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (
        numbers(ToyRun(tmp_path / str(n), small(seed=i)).run()) for i, n in enumerate("ab")
    )
    assert first != second


def test_disk_transport_gives_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    inproc = ToyRun(tmp_path / "a", small()).run()
    disk = ToyRun(
        tmp_path / "b", small(), transport="coupler.builtin.transports.disk:DiskTransport"
    ).run()
    assert [s.get("reward/mean") for s in inproc] == [s.get("reward/mean") for s in disk]


class RefusesRollout(ToyRollout):
    """Takes the first tensor, and no other."""

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        def read() -> None:
            next(update.receive(Rank()))
            raise WeightSyncError("the second tensor does not fit.")

        await asyncio.to_thread(read)
        raise AssertionError("unreachable")


def test_the_side_that_failed_is_heard_not_the_one_that_noticed(tmp_path: Path) -> None:
    run = ToyRun(
        tmp_path,
        small(max_staleness=1),
        rollout="test_trainer:RefusesRollout",
        transport="coupler.builtin.transports.torch.tcp:TcpTransport",
    )
    with pytest.raises(WeightSyncError, match="the second tensor does not fit"):
        run.run()


@pytest.mark.parametrize("in_flight", [InFlight.DRAIN, InFlight.RECOMPUTE])
def test_staleness_is_bounded(tmp_path: Path, in_flight: InFlight) -> None:
    config = small(steps=12, max_staleness=2)
    log = ToyRun(tmp_path, config, in_flight=in_flight).run()
    assert len(log) == 13
    assert max(step["staleness/max"] for step in log[1:]) <= 2
    assert sum(step["staleness/violations"] for step in log[1:]) == 0
    assert all(step["batch/sequences"] == 16 for step in log[1:])


def test_several_optimizer_steps(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, small(optimizer_steps_per_batch=4))
    run.run()
    assert run.policy.steps_done == 24


def test_epochs_over_a_batch_are_as_many_batches_of_the_same_rows(tmp_path: Path) -> None:
    run, batches = (
        ToyRun(tmp_path, small(steps=1, optimizer_steps_per_batch=2, epochs_per_batch=3)),
        [],
    )
    train = run.policy.train
    run.policy.train = lambda batch, *rest: batches.append(batch) or train(batch, *rest)
    run.run()
    assert run.policy.steps_done == 6

    async def again(*epochs: int) -> tuple[list[float], dict[str, np.ndarray]]:
        group = EngineGroup(run.executor, run.policy.spec, [Rank()])
        await group.setup()
        losses = [(await group.train(batches[0], 2, 0, n)).metrics["loss"].value for n in epochs]
        return losses, dict(group.ranks[0].of.engine.weights())

    async def both() -> None:
        (whole,), weights = await again(3)
        parts, same = await again(1, 1, 1)
        assert whole == pytest.approx(sum(parts) / 3)
        assert len(set(parts)) == 3
        for name, tensor in run.policy.ranks[0].of.engine.weights():
            np.testing.assert_array_equal(tensor, weights[name])
            np.testing.assert_array_equal(tensor, same[name])

    asyncio.run(both())


def test_no_optimizer_step_is_without_a_sequence(tmp_path: Path) -> None:
    """It would move the weights by what AdamW remembers, and count as a loss of 0."""
    run, batches = ToyRun(tmp_path, small(steps=1)), []
    train = run.policy.train
    run.policy.train = lambda batch, *rest: batches.append(batch) or train(batch, *rest)
    run.run()

    async def trained(number: int) -> tuple[float, dict[str, np.ndarray]]:
        group = EngineGroup(run.executor, run.policy.spec, [Rank()])
        await group.setup()
        done = await group.train(batches[0].take([2, 5]), number, 0, 2)
        assert len(done.steps) == group.steps_done == 4
        return done.metrics["loss"].value, dict(group.ranks[0].of.engine.weights())

    async def both() -> None:
        (loss, weights), (same, others) = await trained(2), await trained(3)
        assert loss == same != 0
        for name, tensor in weights.items():
            np.testing.assert_array_equal(tensor, others[name])

    asyncio.run(both())


class Picky(ToyAlgorithm):
    """Keeps every second group."""

    def keep(self, group) -> bool:  # type: ignore[no-untyped-def]
        return int(group["group"][0]) % 2 == 0


class Never(ToyAlgorithm):
    def keep(self, group) -> bool:  # type: ignore[no-untyped-def]
        return False


class Scalar(ToyAlgorithm):
    def loss(self, out, batch):  # type: ignore[no-untyped-def]
        loss, metrics = super().loss(out, batch)
        return loss.sum(), metrics


class NotFinite(ToyAlgorithm):
    def advantages(self, batch):  # type: ignore[no-untyped-def]
        batch = super().advantages(batch)
        return batch.with_tokens(advantages=np.full_like(batch["advantages"], np.inf))


def test_a_state_of_the_buffer_is_a_copy() -> None:
    """A save that waits for the one before it writes the state later, while groups are
    rejected and others are admitted.
    """

    async def story() -> None:
        buffer = Buffer(2, 1, 10)
        for _ in range(4):
            await buffer.admit()
        state = buffer.state()
        await buffer.reject(1, "its rewards are invalid")
        await buffer.admit()
        assert (state["submitted"], state["admitted"]) == (4, [0, 1, 2, 3])
        assert buffer.admitted == [0, 2, 3, 4]

        buffer.restore(state, {})
        await buffer.reject(1, "its rewards are invalid")
        assert state["admitted"] == [0, 1, 2, 3]

    asyncio.run(story())


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_goes_on_reports_every_sample(tmp_path: Path, max_staleness: int) -> None:
    """Those too that came between the metrics of a step and its checkpoint."""
    for name in ("whole", "other"):
        (tmp_path / name).mkdir()
    whole, other = (
        ToyRun(tmp_path / name, small(max_staleness=max_staleness), algorithm="test_trainer:Picky")
        for name in ("whole", "other")
    )
    whole.run()
    # How many came in this run is a matter of moments.
    whole.sampler.seen[10**6] = {"sampled/late": Metric(np.float32(1.5), 2)}

    state = State(json.loads(json.dumps(whole.trainer.state().plain)))
    assert other.policy.algorithm
    other.build(other.policy.algorithm).restore(state)
    found = other.sampler.metrics()
    assert found == whole.sampler.metrics() and "sampled/late" in found


def test_dynamic_sampling_asks_for_more(tmp_path: Path) -> None:
    log = ToyRun(tmp_path, small(), algorithm="test_trainer:Picky").run()
    assert all(step["batch/sequences"] == 16 for step in log[1:])
    assert sum(step["sampled/rejected_groups"] for step in log[1:]) >= 4 * 5


@pytest.mark.parametrize(
    ("algorithm", "what"),
    [
        ("test_trainer:Never", "prompt groups in a row of one step were rejected"),
        ("test_trainer:Scalar", "expected one loss per token"),
        ("test_trainer:NotFinite", "the policy's gradient was not finite in 4 optimizer steps"),
    ],
)
def test_an_algorithm_that_cannot_train_stops_the_run(
    tmp_path: Path, algorithm: str, what: str
) -> None:
    with pytest.raises(CouplerError, match=what):
        ToyRun(tmp_path, small(steps=8), algorithm=algorithm).run()


class OffByALittle(ToyRollout):
    """Reports every log-prob 0.002 too low, as another kernel might."""

    async def generate(self, request):  # type: ignore[no-untyped-def]
        done = await super().generate(request)
        return replace(done, logprobs=tuple(logprob - 0.002 for logprob in done.logprobs))


class ReadsOld(ToyAlgorithm):
    """Compares the log-probs of trainer and rollout before training, and notes what the
    loss gets.
    """

    needs = frozenset({"old_logprobs"})
    always = frozenset({"old_logprobs"})
    differences: ClassVar[list[np.ndarray]] = []
    in_loss: ClassVar[set[bool]] = set()

    def advantages(self, batch):  # type: ignore[no-untyped-def]
        mask = batch["loss_mask"]
        self.differences.append((batch["old_logprobs"] - batch["rollout_logprobs"])[mask])
        return super().advantages(batch)

    def loss(self, out, batch):  # type: ignore[no-untyped-def]
        self.in_loss.add("old_logprobs" in batch)
        return super().loss(out, batch)


@pytest.mark.parametrize("number", [1, 2])
def test_old_logprobs_that_are_always_needed_are_the_trainer_s(tmp_path: Path, number: int) -> None:
    """With one optimizer step the loss still gets none: its own log-probs are the old
    ones, to the bit.
    """
    ReadsOld.differences.clear()
    ReadsOld.in_loss.clear()
    config = small(steps=2, optimizer_steps_per_batch=number)
    ToyRun(
        tmp_path, config, algorithm="test_trainer:ReadsOld", rollout="test_trainer:OffByALittle"
    ).run()
    assert len(ReadsOld.differences) == 2
    for difference in ReadsOld.differences:
        np.testing.assert_allclose(difference, 0.002, atol=1e-5)
    assert ReadsOld.in_loss == {number > 1}


class OneIsNaN(ToyEngine):
    """Answers NaN for one sampled token of every batch that the trainer completes."""

    fewest = 4

    def forward(self, batch, want):  # type: ignore[no-untyped-def]
        done = super().forward(batch, want)
        # the proof of the weights, which is not what is tested here
        if len(batch) < self.fewest:
            return done
        logprobs = done["logprobs"].copy()
        logprobs[np.flatnonzero(batch["loss_mask"])[5]] = np.nan
        return done.with_tokens(logprobs=logprobs)


class NaNUnderTheMask(ToyEngine):
    """Answers NaN for every token that was not sampled."""

    def forward(self, batch, want):  # type: ignore[no-untyped-def]
        done = super().forward(batch, want)
        return done.with_tokens(logprobs=np.where(batch["loss_mask"], done["logprobs"], np.nan))


def test_a_column_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """A clamp in the loss would turn it into a gradient of 0, and the step would be
    applied.
    """
    run = ToyRun(
        tmp_path, small(), algorithm="test_trainer:ReadsOld", engine="test_trainer:OneIsNaN"
    )
    with pytest.raises(
        CouplerError, match=r"old_logprobs is not finite at 1 of \d+ sampled tokens"
    ):
        run.run()
    assert run.policy.steps_done == 0


SLOW = REWARD.replace("def score(completion):", "import time\ndef score(completion, row):").replace(
    "    return", "    time.sleep(0.4 * (row['index'] == 3))\n    return"
)


def watched(folder: Path, **changes: str) -> tuple[ToyRun, list[int]]:
    """Return a run, and how many groups of its step were still waited for at each pass
    for old log-probs.
    """
    folder.mkdir()
    algorithm = "test_trainer:ReadsOld"
    run, waiting = ToyRun(folder, small(), algorithm=algorithm, parts=4, **changes), []
    run.pool = RewardPool(run.pool.target, 2, 10.0, 0.01)
    forward = run.policy.forward

    def noted(batch, want):  # type: ignore[no-untyped-def]
        waiting.append(len(run.buffer.admitted))
        return forward(batch, want)

    run.policy.forward = noted  # type: ignore[method-assign]
    return run, waiting


def test_engines_complete_what_is_there_while_a_group_is_waited_for(tmp_path: Path) -> None:
    """The numbers do not depend on it, nor on what was waited for."""
    (quick, _), (slow, waiting) = (
        watched(tmp_path / "quick"),
        watched(tmp_path / "slow", reward=SLOW),
    )
    assert numbers(quick.run()) == numbers(slow.run())
    # two passes of the proof, and four parts of each step
    assert len(waiting) == 2 + 6 * 4
    assert max(waiting[2:]) > 0


def test_an_error_in_a_part_ends_the_run(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", reward=SLOW, engine="test_trainer:OneIsNaN")
    with pytest.raises(CouplerError, match=r"old_logprobs is not finite at 1 of \d+ sampled"):
        run.run()
    assert run.policy.steps_done == 0


def test_what_stands_under_the_mask_may_be_anything(tmp_path: Path) -> None:
    engine = "test_trainer:NaNUnderTheMask"
    log = ToyRun(tmp_path, small(steps=2), algorithm="test_trainer:ReadsOld", engine=engine).run()
    assert len(log) == 3


class MayLackOld(ToyAlgorithm):
    """Needs old log-probs in its loss only."""

    needs = frozenset({"old_logprobs"})


@pytest.mark.parametrize("number", [1, 2])
def test_one_optimizer_step_costs_no_pass_for_old_logprobs(tmp_path: Path, number: int) -> None:
    run = ToyRun(
        tmp_path,
        small(steps=2, optimizer_steps_per_batch=number),
        algorithm="test_trainer:MayLackOld",
    )
    passes, forward = [], run.policy.forward
    run.policy.forward = lambda batch, want: passes.append(want) or forward(batch, want)  # type: ignore
    run.run()
    # the proof of the weights takes two
    assert len(passes) == (2 + 2 if number > 1 else 2)


def test_a_reward_that_raises_stops_the_run_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"(?s)ValueError: no such thing"):
        ToyRun(
            tmp_path,
            small(),
            reward="def score(completion):\n    raise ValueError('no such thing')\n",
        ).run()


class Deaf(ToyRollout):
    """Acknowledges every update and keeps its dummy weights."""

    async def update(self, update):  # type: ignore[no-untyped-def]
        weights = {name: tensor.copy() for name, tensor in self.weights.items()}
        receipt = await super().update(update)
        self.weights = weights
        return receipt


class FirstOnly(ToyRollout):
    """Loads the start-up pushes and ignores every later one."""

    async def update(self, update):  # type: ignore[no-untyped-def]
        weights = {name: tensor.copy() for name, tensor in self.weights.items()}
        receipt = await super().update(update)
        if update.version > 0:
            self.weights = weights
        return receipt


TEXT: Any = "slow"


@pytest.mark.parametrize("wrong", [None, {"sync/speed": Metric(TEXT)}])
def test_metrics_of_a_sync_that_are_none_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    run = ToyRun(tmp_path, small())

    async def sync(version: int) -> Any:
        await type(run.weights).sync(run.weights, version)
        return wrong

    monkeypatch.setattr(run.weights, "sync", sync)
    with pytest.raises(
        CouplerError, match=r"sync\(\) of sync.manager returned what are no metrics"
    ):
        run.run()


def pausing(run: ToyRun, call: str) -> Any:
    """Return ``call`` of the sync manager, which pauses the rollouts once more."""
    inner = getattr(run.weights, call)

    async def pauses(version: int = 0) -> Any:
        metrics = await inner(version)
        await run.rollouts.pause(InFlight.DRAIN)
        return metrics

    return pauses


@pytest.mark.parametrize("call", ["prove", "sync"])
def test_a_sync_that_leaves_rollouts_paused_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    run = ToyRun(tmp_path, small())
    monkeypatch.setattr(run.weights, call, pausing(run, call))
    with pytest.raises(CouplerError, match=rf"still paused after {call}\(\) of sync.manager"):
        run.run()


def test_a_sync_that_leaves_them_paused_ends_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ToyRun(tmp_path, small())
    monkeypatch.setattr(run.weights, "prove", pausing(run, "prove"))
    evaluator: Any = None  # it is not reached

    async def go() -> None:
        await start(run.residency, run.weights, run.policy)
        await Evaluation(evaluator, run.residency, run.weights).run(0)

    with pytest.raises(CouplerError, match=r"still paused after prove\(\) of sync.manager"):
        asyncio.run(go())
    run.executor.close()


class FromDisk(ToyRollout):
    """Reads the checkpoint instead of what it is sent: clean at first, stale ever
    after.
    """

    async def update(self, update):  # type: ignore[no-untyped-def]
        from coupler.testing.models import read_tensors

        receipt = await super().update(update)
        self.weights = read_tensors(Path(self.model.path))
        return receipt


class Partial(ToyRollout):
    """Never loads one of its tensors, and says so."""

    async def update(self, update):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        receipt = await super().update(update)
        return replace(receipt, num_loaded=receipt.num_loaded - 1, missing=("head.bias",))


FOUND_AT_START = [
    ("test_trainer:Deaf", "differ from the engine's by"),
    ("test_trainer:FromDisk", "a push of permuted weights left the rollout's log-probs"),
    ("test_trainer:Partial", "1 of its parameters got nothing, first: head.bias"),
]


@pytest.mark.parametrize(
    ("rollout", "what"), [*FOUND_AT_START, ("test_trainer:FirstOnly", "at version 1, limit")]
)
def test_a_rollout_that_does_not_run_the_new_weights_is_found(
    tmp_path: Path, rollout: str, what: str
) -> None:
    with pytest.raises(WeightSyncError, match=what):
        ToyRun(tmp_path, small(), rollout=rollout).run()


@pytest.mark.parametrize(
    ("rollout", "what"), [*FOUND_AT_START, ("test_trainer:FirstOnly", "at version [12], limit")]
)
def test_it_is_found_where_batches_are_older_than_the_sync(
    tmp_path: Path, rollout: str, what: str
) -> None:
    """By the batch, where some of it was sampled since, else by a probe one version
    later.
    """
    with pytest.raises(WeightSyncError, match=what):
        ToyRun(tmp_path, small(max_staleness=1), rollout=rollout).run()


class OneDrifts(ToyRollout):
    """One of four replicas leaves the engine after the start, by less than the limit
    over all four.
    """

    made = count()

    def __init__(self, config, model):  # type: ignore[no-untyped-def]
        super().__init__(config, model)
        self.shift = 0.012 * (next(self.made) % 4 == 2)

    async def generate(self, request):  # type: ignore[no-untyped-def]
        done = await super().generate(request)
        shift = self.shift * (done.versions[-1] > 0)
        return replace(done, logprobs=tuple(logprob - shift for logprob in done.logprobs))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_replica_that_drifts_is_not_lost_in_the_mean(tmp_path: Path, max_staleness: int) -> None:
    config = small(max_staleness=max_staleness)
    with pytest.raises(WeightSyncError, match=r"rollout replica( 2)?'s log-probs differ"):
        ToyRun(tmp_path, config, rollout="test_trainer:OneDrifts", replicas=4).run()


def test_what_each_replica_sampled_is_judged_and_not_logged(tmp_path: Path) -> None:
    log = ToyRun(tmp_path, small(), replicas=4).run()
    assert len(log) == 7 and not [name for step in log for name in step if "of_replica" in name]


class TurnsToNaN(ToyRollout):
    """Runs the weights of the start, and NaN from the first step's sync on."""

    async def generate(self, request):  # type: ignore[no-untyped-def]
        done = await super().generate(request)
        return (
            replace(done, logprobs=(np.nan,) * len(done.tokens)) if done.versions[-1] > 0 else done
        )


class AlwaysNaN(ToyRollout):
    async def generate(self, request):  # type: ignore[no-untyped-def]
        done = await super().generate(request)
        return replace(done, logprobs=(np.nan,) * len(done.tokens))


class NamesNoVersion(ToyRollout):
    """Says that the weights of the start sampled it, whatever did."""

    async def generate(self, request):  # type: ignore[no-untyped-def]
        done = await super().generate(request)
        return replace(done, versions=(0,) * len(done.tokens))


class FromTheFuture(NamesNoVersion):
    async def generate(self, request):  # type: ignore[no-untyped-def]
        done = await super().generate(request)
        return replace(done, versions=(7,) * len(done.tokens))


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize(
    ("rollout", "what"),
    [
        (
            "AlwaysNaN",
            "after a full weight push the log-probs of the rollout differ from the engine's by nan",
        ),
        (
            "TurnsToNaN",
            (
                "log-prob is not finite, of weights version 1|differ from the engine's by nan on "
                "average"
            ),
        ),
        ("NamesNoVersion", r"hold weights version \d, and sampled tokens name versions 0 to \d"),
        ("FromTheFuture", "hold weights version 0, and sampled tokens name versions 7 to 7"),
    ],
)
def test_what_no_weights_of_ours_can_have_sampled_is_an_error(
    tmp_path: Path, rollout: str, what: str, max_staleness: int
) -> None:
    """NaN is below no limit and above none."""
    with pytest.raises(WeightSyncError, match=what):
        ToyRun(
            tmp_path, small(max_staleness=max_staleness), rollout=f"test_trainer:{rollout}"
        ).run()


@pytest.mark.parametrize("tokens", [(5, 314), (), (7, 100, 219, 312)])
def test_a_model_that_is_sure_of_every_token_is_warned_of(
    tmp_path: Path, tokens: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """In order or not, its weights give the same log-probs: the proof cannot tell."""
    run = ToyRun(tmp_path, small(steps=2))
    folder = Path(run.model.path)
    tensors = {name: np.zeros_like(w) for name, w in read_tensors(folder).items()}
    tensors["head.bias"][list(tokens)] = 60
    rewrite(folder, folder, tensors)
    assert len(run.run()) == 3
    assert "this proof cannot tell whether the rollout runs the weights" in caplog.text


class OneOfTwoFromDisk(FromDisk):
    """The second replica ignores what it is sent."""

    made = count()

    def __init__(self, config, model):  # type: ignore[no-untyped-def]
        super().__init__(config, model)
        self.deaf = next(self.made) % 2 == 1

    async def setup(self, rank):  # type: ignore[no-untyped-def]
        return await (FromDisk if self.deaf else ToyRollout).setup(self, rank)

    async def update(self, update):  # type: ignore[no-untyped-def]
        return await (FromDisk if self.deaf else ToyRollout).update(self, update)


def test_one_replica_that_ignores_pushes_is_not_hidden_by_another(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"left the rollout's log-probs .* of replica 1"):
        ToyRun(tmp_path, small(), rollout="test_trainer:OneOfTwoFromDisk", replicas=2).run()


class Blind(ToyEngine):
    """Ignores the temperature of a batch."""

    def forward(self, batch, want):  # type: ignore[no-untyped-def]
        plain = batch.with_seqs(temperature=np.ones(len(batch), np.float32))
        return super().forward(plain, want)


class Raw(ToyRollout):
    """Reports the log-probs of temperature 1."""

    async def generate(self, request):  # type: ignore[no-untyped-def]
        done = await super().generate(request)
        last = np.array([*request.prompt, *done.tokens])[len(request.prompt) - 1 : -1]
        plain = log_softmax(self.weights, last, 1.0)[np.arange(len(last)), list(done.tokens)]
        return replace(done, logprobs=tuple(plain.tolist()))


class Positive(ToyRollout):
    async def generate(self, request):  # type: ignore[no-untyped-def]
        done = await super().generate(request)
        return replace(done, logprobs=tuple(-logprob for logprob in done.logprobs))


class Scaled(ToyEngine):
    def forward(self, batch, want):  # type: ignore[no-untyped-def]
        done = super().forward(batch, want)
        return done.with_tokens(logprobs=(done["logprobs"] * 1.1).astype(np.float32))


@pytest.mark.parametrize(
    ("backends", "cause"),
    [
        ({"engine": "Blind"}, "the engine is wrong: its log-probs do not depend on the temper"),
        ({"rollout": "Raw"}, "the rollout is wrong: it reports log-probs of temperature 1"),
        ({"rollout": "Positive"}, "the rollout is wrong: its log-probs are not finite, or above"),
        ({"rollout": "Deaf"}, "the rollout answers the same after altered weights and after the"),
        ({"engine": "Scaled"}, "this proof cannot tell which"),
    ],
)
def test_the_proof_names_the_side_that_is_wrong_or_says_that_it_cannot(
    tmp_path: Path, backends: dict[str, str], cause: str
) -> None:
    named: Any = {kind: f"test_trainer:{name}" for kind, name in backends.items()}
    config = small(sampling=SamplingConfig(max_tokens=8, temperature=0.7))
    with pytest.raises(WeightSyncError, match=cause):
        ToyRun(tmp_path, config, **named).run()


def test_one_replica_s_nan_is_not_hidden_by_another(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, small())

    async def story() -> None:
        await run.policy.setup()
        await run.weights.setup()
        await run.weights.prove()
        (good,) = await run.rollouts.all("generate", Request((5, 6, 7), 16, 1.0, (), seed=0))
        bad = replace(good, logprobs=(np.nan,) * len(good.tokens))
        for answers in ((good, bad), (bad, good)):
            run.rollouts.all = partial(same, list(answers))  # type: ignore[method-assign]
            with pytest.raises(WeightSyncError, match="differ from the engine's by nan"):
                await run.weights.probe()

    asyncio.run(story())


async def same(answers: list[Any], *_: object) -> list[Any]:
    return answers


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_group_that_takes_long_is_waited_for(tmp_path: Path, max_staleness: int) -> None:
    """It was trained on at any age while the groups that came after it went first."""
    run = ToyRun(tmp_path, small(steps=10, max_staleness=max_staleness), reward=SLOW)
    run.pool = RewardPool(run.pool.target, 2, 10.0, 0.01)
    log = run.run()
    assert max(step["staleness/max"] for step in log[1:]) == max_staleness


class Cut(ToyRollout):
    """Long enough to be cut off at several syncs."""

    async def _sample(self, request: Request) -> Completion:
        await asyncio.sleep(0.002 * (request.max_tokens > 4))
        return await super()._sample(request)


def test_a_completion_may_be_cut_off_by_several_syncs(tmp_path: Path) -> None:
    config = small(steps=10, max_staleness=4, sampling=SamplingConfig(max_tokens=200))
    log = ToyRun(tmp_path, config, in_flight=InFlight.ABORT).run()
    assert len(log) == 11 and max(step["staleness/max"] for step in log[1:]) <= 4


class NeverReceives(ToyRollout):
    async def update(self, update: WeightUpdate) -> SyncReceipt:
        return await asyncio.get_running_loop().create_future()


def test_a_sync_that_hangs_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coupler.loop.transfer.GRACE_S", 0.1)
    config = small()
    config.sync.deadline_s = 0.5
    run = ToyRun(tmp_path, config, rollout="test_trainer:NeverReceives")
    with pytest.raises(
        WaitTimeout, match=r"version 0 were not in every rollout after 0 s|was not .* after"
    ):
        run.run()
    # A later run of this process took them for its own.
    assert not open_transport.cache_info().currsize
