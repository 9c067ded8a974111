"""Check what a transport must do beyond one bucket and one update: large tensors, more
of them than any buffer holds, many updates, a sender that fails.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from coupler.errors import CouplerError
from coupler.interfaces import Named, WeightUpdate
from coupler.system.process_memory import resident_bytes
from coupler.testing import expect
from coupler.testing.conformance.test_transport import Link, arrays, assert_same, copied
from coupler.testing.subject import Subject
from coupler.worker.worker import reverse_elements

LARGE = 40 << 20  # bytes of a tensor, above the buckets of every transport
COUNT = 1500  # tensors of one update
UPDATES, LAST, KEPT_BYTES = 28, 12, 4 << 20


def large() -> list[Named]:
    """Return a tensor above every bucket between small ones."""
    random = np.random.default_rng(0)
    whole = random.integers(0, 2**31, LARGE // 4, np.int32).view(np.float32)
    whole[np.isnan(whole)] = 1
    small = [(f"model.small.{i}", random.normal(size=(3, 5)).astype(np.float32)) for i in (0, 1)]
    return [small[0], ("model.large", whole.reshape(1024, -1)), small[1]]


def many() -> list[Named]:
    """Return more tensors than any buffer holds, of which pairs have one shape."""
    random = np.random.default_rng(1)
    return [
        (f"model.layers.{i}.weight", random.normal(size=(1 + i // 2 % 7, 11)).astype(np.float32))
        for i in range(COUNT)
    ]


@pytest.mark.parametrize("weights", [large, many], ids=["large", "many"])
def test_more_than_any_buffer_arrives(
    transport_subject: Subject, weights: Callable[[], list[Named]]
) -> None:
    """Twice, with other contents the second time."""
    link, current = Link(transport_subject), weights()
    for version in range(2):
        _, received = link.carry(version, current)
        expect.same(len(received[0]), len(current), f"the tensors that arrive of {len(current)}")
        assert_same(received[0], current)
        current = [(name, np.ascontiguousarray(tensor[::-1])) for name, tensor in current]


def test_an_attempt_is_not_taken_for_another(transport_subject: Subject) -> None:
    """A replica died and the same version comes again: permuted, whole, or moved."""
    link, weights = Link(transport_subject), arrays()
    plain = link.update

    for attempt, permuted in ((0, True), (1, True), (1, False), (2, False)):

        def update(version: int, _: bool = False, now: tuple = (attempt, permuted)) -> WeightUpdate:
            return replace(plain(version), attempt=now[0], permuted=now[1])

        link.update = update  # type: ignore[method-assign]
        current = [(name, np.roll(tensor, attempt)) for name, tensor in weights]
        _, received = link.carry(4, current, permuted)
        want = [(n, reverse_elements(t) if permuted else t) for n, t in current]
        assert_same(received[0], want)


def held_bytes() -> int:
    """Return the resident memory once all that nobody needs went back to the system."""
    gc.collect()  # A cycle may hold the last update until then.
    with suppress(AttributeError, OSError):
        # Each thread of a transfer has an arena, which else keeps what was freed.
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def test_memory_stays_over_many_updates(transport_subject: Subject) -> None:
    """Nothing that was carried is kept."""
    link = Link(transport_subject)
    weights = [("model.weight", np.ones((2048, 1024), np.float32))]
    sizes = []
    for version in range(UPDATES):
        link.carry(version, weights)
        sizes.append(held_bytes())
    # What is kept makes every update cost memory. An allocator grows now and then, and
    # most at first.
    rises = sum(after - before > KEPT_BYTES for before, after in pairwise(sizes[-LAST:]))
    expect.below(rises, LAST - 2, f"how many of {LAST - 1} updates of 8 MiB make memory grow")


def test_a_sender_that_fails_leaves_no_whole_update(transport_subject: Subject) -> None:
    """Its error is raised where it sends. Who receives gets an error too, and never the
    end of a stream that looks whole. The next update arrives.
    """
    link, weights = Link(transport_subject, deadline_s=2.0), arrays()
    update = link.update(0)

    def failing() -> Iterator[Named]:
        for name, tensor in weights[:5]:
            yield name, copied(tensor)
        raise MemoryError("the kit lets this sender fail")

    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(link.transport.send, failing(), update, link.senders[0])
        receiving = pool.submit(link._collect, update, link.receivers[0])
        raised, got = sending.exception(timeout=60), receiving.exception(timeout=60)
    expect.holds(raised is not None, "send() to raise the error of its weights, it returned")
    expect.holds(
        isinstance(got, CouplerError | OSError),
        "an error of core where a sender failed after 5 tensors",
        got if got is not None else f"{len(receiving.result())} tensors and no error",
    )
    expect.below(time.monotonic() - begun, 20, "the seconds until both sides know")

    link.deadline_s = 30.0
    _, received = link.carry(1, weights)
    assert_same(received[0], weights)
