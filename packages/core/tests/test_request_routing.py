"""Router: which replica a request goes to, and when a session leaves the one it had."""

from __future__ import annotations

from coupler.interfaces import Completion, Request
from coupler.loop.routing import MARGIN, Router

EVERYONE = range(4)


def request(session: str = "", prompt: int = 100, completion: int = 100) -> Request:
    return Request(tuple(range(prompt)), completion, session=session)


def completion(tokens: int) -> Completion:
    return Completion((1,) * tokens, (0.0,) * tokens, (0,) * tokens, "length")


def test_a_session_keeps_its_replica_and_counts_what_is_cached_there() -> None:
    router = Router(2)
    index, cost = router.start(request("talk"), [0, 1])
    assert (index, cost) == (0, 200)
    router.finish(request("talk"), index, cost, completion(60))
    again = request("talk", prompt=180)
    # 160 of the 180 tokens are cached, and completions have 60 tokens in the mean.
    assert router.start(again, [0, 1]) == (0, 20 + 60)
    assert router.outstanding == [80, 0]
    assert router.metrics()["rollout/session_hits"].value == 1.0


def test_a_session_leaves_an_overloaded_replica_and_is_counted() -> None:
    router = Router(2)
    index, cost = router.start(request("talk"), [0, 1])
    router.finish(request("talk"), index, cost, completion(100))
    for _ in range(6):
        router.start(request(), [0])
    assert router.start(request("talk"), [0, 1]) == (1, 200)
    assert router.sessions["talk"].replica == 1
    metrics = router.metrics()
    assert metrics["rollout/migrations"].value == 1.0
    assert metrics["rollout/session_hits"].value == 0.0
    assert router.metrics() == {}


def test_a_session_stays_within_the_margin() -> None:
    router = Router(2)
    index, cost = router.start(request("talk"), [0, 1])
    router.finish(request("talk"), index, cost, completion(100))
    for _ in range(int(MARGIN)):
        router.start(request(), [0])
    assert router.start(request("talk"), [0, 1])[0] == 0


def test_many_requests_of_one_session_spread_over_the_replicas() -> None:
    router = Router(4)
    for _ in range(64):
        router.start(request("talk", prompt=10), EVERYONE)
    assert max(router.outstanding) - min(router.outstanding) <= (MARGIN + 1) * 110
    assert min(router.outstanding) > 0


def test_a_group_that_is_kept_whole_stays_on_one_replica() -> None:
    router = Router(4)
    router.begin("group 1")
    for _ in range(64):
        router.start(request("group 1"), EVERYONE)
    assert sorted(router.outstanding)[:3] == [0, 0, 0]
    (kept,) = {index for index in EVERYONE if router.outstanding[index]}
    router.start(request("group 1"), [index for index in EVERYONE if index != kept])
    assert router.metrics() == {}, "a death is no choice of the router"
    router.end("group 1")
    assert not router.sessions


def test_new_weights_end_the_caches() -> None:
    router = Router(2)
    index, cost = router.start(request("talk"), [0, 1])
    router.finish(request("talk"), index, cost, completion(100))
    router.forget_caches()
    assert router.start(request("talk"), [0, 1]) == (0, 200)


def test_a_dead_replica_loses_its_sessions() -> None:
    router = Router(2)
    index, cost = router.start(request("talk"), [0, 1])
    router.finish(request("talk"), index, cost, None)
    assert router.outstanding == [0, 0]
    assert router.start(request("talk"), [1]) == (1, 200)
