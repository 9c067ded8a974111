"""Check what every sharding manager must do: after each sync all replicas run the
engine's weights, or the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from coupler.errors import ReplicaDied, WeightSyncError
from coupler.interfaces import InFlight, Request
from coupler.metrics import values
from coupler.plugins.manager import Plugins
from coupler.testing import expect
from coupler.testing.reference import Reference
from coupler.testing.subject import Subject
from coupler.testing.whole_edge import PROMPT, WholeEdge, within

LIES: dict[str, dict[str, Any]] = {
    "a parameter got nothing": {"missing": ("head.bias",)},
    "a name has no parameter": {"unexpected": ("head.scale",)},
    "a tensor did not arrive": {"num_received": 2, "num_loaded": 2},
    "a tensor was not loaded": {"num_loaded": 2},
    "the version is another": {"version": 41},
}

Make = Callable[..., WholeEdge]


@pytest.fixture(params=["inproc", "tcp"])
def edge(
    request: pytest.FixtureRequest,
    sharding_subject: Subject,
    reference_of: Callable[[str], Reference],
) -> Iterator[Make]:
    """Build an edge whose weights this transport carries."""
    folder: Path = reference_of("toy").folder
    transport = Plugins.load().get("transport", request.param)
    made: list[WholeEdge] = []

    def make(in_flight: InFlight = InFlight.DRAIN) -> WholeEdge:
        made.append(WholeEdge(sharding_subject, transport, folder, in_flight))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_every_replica_runs_the_weights_just_trained(edge: Make) -> None:
    """Replicas do so after the proof, which in a resumed run is not of version 0, and
    after every sync.
    """

    async def steps(one: WholeEdge) -> None:
        await one.start(version=3)
        await one.compare(3)
        for version in (4, 5, 6):
            one.train()
            await one.sync(version)
            await one.compare(version)

    asyncio.run(steps(edge()))


def test_metrics_are_numbers(edge: Make) -> None:
    async def steps(one: WholeEdge) -> None:
        await one.engine.setup()
        await one.manager.setup()
        for name, work in (("prove", one.manager.prove(0)), ("sync", one.manager.sync(1))):
            found = values(await within(work, name))
            odd = {key: value for key, value in found.items() if not isfinite(value)}
            assert not odd, f"expected finite metrics from {name}(), came {odd}"
        judged = one.manager.check({})
        assert isinstance(judged, bool), f"expected True or False from check(), came {judged!r}"
        values(await one.manager.probe())

    asyncio.run(steps(edge()))


def test_nothing_is_sampled_during_a_sync(edge: Make) -> None:
    """Requests keep coming. Those that run are drained, later ones wait, and each is of
    one version.
    """

    async def steps(one: WholeEdge) -> None:
        await one.start()
        stop = asyncio.Event()

        async def keep_asking(seed: int) -> list[set[int]]:
            found = []
            while not stop.is_set():
                done = await one.rollouts.generate(Request(PROMPT, 12, 1.0, (), seed=seed))
                found.append(set(done.versions))
            return found

        asking = [asyncio.ensure_future(keep_asking(seed)) for seed in range(4)]
        for version in (1, 2, 3):
            await asyncio.sleep(0.02)
            one.train()
            await one.sync(version)
        stop.set()
        found = await within(asyncio.gather(*asking), "an answer to every request after the sync")

        seen = [replica.sampled_meanwhile for replica in one.replicas]
        assert seen == [0, 0], (
            f"expected no replica to sample while its weights change, seen so often: {seen}"
        )
        mixed = [versions for each in found for versions in each if len(versions) > 1]
        assert not mixed, (
            f"expected completions of one version each, since requests were drained, came {mixed}"
        )
        await one.compare(3)

    asyncio.run(steps(edge()))


def test_requests_in_flight_are_treated_as_the_run_says(edge: Make) -> None:
    """A request that is being sampled goes on with the new weights under
    ``in_flight=recompute``.
    """

    async def steps(one: WholeEdge) -> None:
        await one.start()
        asked = asyncio.ensure_future(one.rollouts.generate(Request(PROMPT, 400, 1.0, (), seed=1)))
        for _ in range(20):
            await asyncio.sleep(0)
        active = sum(replica.active for replica in one.replicas)

        assert active == 1, (
            "expected the request to be sampled after prove(): were the rollouts resumed?"
        )
        one.train()
        await one.sync(1)
        done = await within(asked, "the request to end after the sync")
        assert set(done.versions) == {0, 1}, (
            "expected tokens of versions 0 and 1, since the pause got InFlight.RECOMPUTE, "
            f"came {set(done.versions)}"
        )

    asyncio.run(steps(edge(InFlight.RECOMPUTE)))


def test_weights_move_in_their_turn(edge: Make) -> None:
    """The engine's parameters are on a shared device in ``residency.syncing`` alone."""

    async def steps(one: WholeEdge) -> None:
        await one.start()
        await one.sync(1)
        found = set(one.rollouts.updated_in)
        assert found == {"syncing"}, (
            f"expected every push within residency.syncing(phase), came {found}"
        )

    asyncio.run(steps(edge()))


async def _dies_of_the_update(one: WholeEdge) -> None:
    one.replicas[1].deaths = 1


async def _dies_twice(one: WholeEdge) -> None:
    one.replicas[0].deaths = 2


async def _both_die(one: WholeEdge) -> None:
    for replica in one.replicas:
        replica.deaths = 1


async def _died_before(one: WholeEdge) -> None:
    one.replicas[0].dies_sampling = True
    asked = one.rollouts.generate(Request(PROMPT, 4, 1.0, (), seed=0))
    done = await within(asked, "a completion of the other replica")
    expect.same(
        (done.replica, one.rollouts.dead), (1, {0}), "(the replica that answered, the dead ones)"
    )


@pytest.mark.parametrize(
    "how", [_died_before, _dies_of_the_update, _dies_twice, _both_die], ids=lambda f: f.__name__
)
def test_a_replica_that_died_gets_the_weights(
    edge: Make, how: Callable[[WholeEdge], Awaitable[None]]
) -> None:
    """The replica starts again with dummy weights. After this sync and the next one it
    samples like the others.
    """

    async def steps(one: WholeEdge) -> None:
        await one.start()
        before = sum(replica.starts for replica in one.replicas)
        one.train()
        await how(one)

        try:
            await one.sync(1)
        except ReplicaDied as error:
            raise AssertionError(
                f"expected the replica to be started again, came ReplicaDied: {error}"
            ) from error

        starts = sum(replica.starts for replica in one.replicas)
        assert starts > before, "expected the dead replica to be started again, it was not"
        await one.compare(1)
        one.train()
        await one.sync(2)
        await one.compare(2)

    asyncio.run(steps(edge()))


def test_a_replica_that_always_dies_ends_the_run(edge: Make) -> None:
    async def steps(one: WholeEdge) -> None:
        await one.start()
        one.replicas[1].deaths = 1000
        with pytest.raises(ReplicaDied):
            await one.sync(1)

    asyncio.run(steps(edge()))


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("replica", [0, 1])
def test_an_incomplete_receipt_is_refused(edge: Make, replica: int, lie: str) -> None:
    """The receipt of any replica ends the run before anything is sampled with such
    weights.
    """

    async def steps(one: WholeEdge) -> None:
        await one.start()
        one.train()
        one.replicas[replica].lie = LIES[lie]

        try:
            await one.sync(1)
        except WeightSyncError:
            return

        raise AssertionError(
            f"expected WeightSyncError, since the receipt of replica {replica} says that "
            f"{lie}, nothing was raised"
        )

    asyncio.run(steps(edge()))
