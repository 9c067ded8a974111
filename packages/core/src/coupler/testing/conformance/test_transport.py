"""Check what every transport must do: carry named tensors of any shape and dtype, and
wait for nothing forever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from coupler.errors import WaitTimeout, WeightSyncError
from coupler.interfaces import Named, Rank, SendReceipt, Shapes, Transport, WeightUpdate
from coupler.testing import expect
from coupler.testing.ranks import as_array
from coupler.testing.subject import Subject
from coupler.worker.worker import reverse_elements

SHAPES = ((3, 5), (), (1,), (0, 4), (2, 3, 4), (257, 129))
DTYPES = ("float32", "float64", "float16", "int64", "int8", "uint8")


class Link:
    """Connect senders and receivers of one transport, in threads of this process."""

    def __init__(
        self,
        subject: Subject,
        num_senders: int = 1,
        num_receivers: int = 1,
        deadline_s: float = 30.0,
    ) -> None:
        if subject.has("device:shared"):
            pytest.skip(f"{subject} declares device:shared: that needs two processes and a GPU")
        if subject.has("device:apart") and pytest.importorskip("torch").cuda.is_available():
            pytest.skip(f"{subject} declares device:apart: here all threads would be on one GPU")
        self.subject, self.deadline_s = subject, deadline_s
        self.shapes: Shapes = {}  # of the receivers' model
        self.transport: Transport = subject.backend.load()()
        self.senders = [Rank(index=i, world=num_senders) for i in range(num_senders)]
        self.receivers = [Rank(index=i, world=num_receivers) for i in range(num_receivers)]
        self.endpoints = tuple(self.transport.bind(rank) for rank in self.senders)

    def update(self, version: int, permuted: bool = False) -> WeightUpdate:
        return WeightUpdate(
            version=version,
            format="full",
            transport=self.subject.backend.target,
            endpoints=self.endpoints,
            num_receivers=len(self.receivers),
            deadline_s=self.deadline_s,
            permuted=permuted,
        )

    def carry(
        self, version: int, weights: list[Named], permuted: bool = False
    ) -> tuple[list[Any], list[list[Named]]]:
        """Send on every rank and receive in every worker, at once."""
        update = self.update(version, permuted)
        with ThreadPoolExecutor(len(self.senders) + len(self.receivers)) as pool:
            sending = [
                pool.submit(self.transport.send, stream(weights, permuted), update, r)
                for r in self.senders
            ]
            receiving = [pool.submit(self._collect, update, worker) for worker in self.receivers]
            # Receivers come first: a sender whose receiver failed says only that.
            arrived = [r.result() for r in receiving]
            return [s.result() for s in sending], arrived

    def _collect(self, update: WeightUpdate, worker: Rank) -> list[Named]:
        self.came: list[str] = []
        arrived: list[Named] = []
        for name, tensor in self.transport.receive(update, worker, self.shapes):
            self.came.append(name)
            arrived.append((name, copied(tensor)))
        return arrived


def stream(weights: list[Named], permuted: bool = False) -> Iterator[Named]:
    """Yield weights like an engine: each tensor is overwritten when the next one is
    asked for.
    """
    for name, tensor in weights:
        lent = copied(reverse_elements(tensor) if permuted else tensor)
        yield name, lent
        lent[...] = 0


def copied(tensor: Any) -> Any:
    return np.array(tensor) if isinstance(tensor, np.ndarray) else tensor.clone()


def arrays() -> list[Named]:
    random = np.random.default_rng(0)
    return [
        (f"model.{dtype}.{i}", np.asarray(abs(random.normal(size=shape)) * 9, dtype))
        for dtype in DTYPES
        for i, shape in enumerate(SHAPES)
    ]


def tensors() -> list[Named]:
    torch = pytest.importorskip("torch")
    numbers = [(name, torch.from_numpy(np.array(array))) for name, array in arrays()]
    halves = [
        (f"model.bfloat16.{i}", torch.randn(shape).to(torch.bfloat16))
        for i, shape in enumerate(SHAPES)
    ]
    return [*numbers, *halves, ("model.transposed", torch.randn(6, 4).T)]


def assert_same(got: list[Named], want: list[Named]) -> None:
    assert [name for name, _ in got] == [name for name, _ in want], "names or their order"
    for (name, here), (_, there) in zip(got, want, strict=True):
        assert type(here) is type(there), name
        assert (here.dtype, tuple(here.shape)) == (there.dtype, tuple(there.shape)), name
        np.testing.assert_array_equal(as_array(here), as_array(there), err_msg=name)


@pytest.fixture(params=["arrays", "tensors"])
def weights(request: pytest.FixtureRequest) -> list[Named]:
    return arrays() if request.param == "arrays" else tensors()


def test_tensors_arrive_whole_and_in_order(
    transport_subject: Subject, weights: list[Named]
) -> None:
    """Every shape and dtype arrives, also not contiguous. A tensor may be overwritten
    once the next one is asked for.
    """
    sent, received = Link(transport_subject).carry(0, weights)
    assert_same(received[0], weights)
    assert isinstance(sent[0], SendReceipt), f"expected a SendReceipt, came {sent[0]!r}"
    size = sum(tensor.nbytes for _, tensor in weights)
    expect.same(
        (sent[0].version, sent[0].num_tensors, sent[0].num_bytes),
        (0, len(weights), size),
        "(version, tensors, bytes) of the receipt",
    )
    expect.above(sent[0].seconds, 0, "the seconds of the receipt")


def test_versions_follow_each_other(transport_subject: Subject, weights: list[Named]) -> None:
    """The permuted update of a version arrives too, which comes before the true one."""
    link = Link(transport_subject)
    _, received = link.carry(0, weights, permuted=True)
    assert_same(received[0], [(name, reverse_elements(tensor)) for name, tensor in weights])
    for version in range(3):
        current = [(name, copied(tensor)) for name, tensor in weights]
        for _, tensor in current:
            tensor += version
        _, received = link.carry(version, current)
        assert_same(received[0], current)


def test_every_receiver_gets_every_tensor(transport_subject: Subject, weights: list[Named]) -> None:
    link = Link(transport_subject, num_receivers=3)
    for version in range(2):
        _, received = link.carry(version, weights)
        for each in received:
            assert_same(each, weights)


def test_every_rank_exhausts_its_weights(transport_subject: Subject) -> None:
    """Producing a tensor is collective: a rank that stops asking leaves the others
    waiting.
    """
    link = Link(transport_subject, num_senders=2)
    update, weights = link.update(0), arrays()
    meet = threading.Barrier(2, timeout=10)

    def collective() -> Iterator[Named]:
        for named in weights:
            meet.wait()
            yield named

    with ThreadPoolExecutor(3) as pool:
        sending = [
            pool.submit(link.transport.send, collective(), update, rank) for rank in link.senders
        ]
        receiving = pool.submit(link._collect, update, link.receivers[0])
        expect.same(
            [s.result().num_tensors for s in sending],
            [len(weights)] * 2,
            "the tensors that each rank sent",
        )
        assert_same(receiving.result(), weights)


def test_no_weights_at_all_arrive_too(transport_subject: Subject) -> None:
    _, received = Link(transport_subject).carry(0, [])
    expect.same(received, [[]], "what arrives where nothing was sent")


def test_a_tensor_that_does_not_fit_the_receiver_is_refused(
    transport_subject: Subject, weights: list[Named]
) -> None:
    """The error has its name and both shapes, also where as many elements would fit.
    The next update arrives.
    """
    link = Link(transport_subject)
    name = next(name for name, tensor in weights if tuple(tensor.shape) == (2, 3, 4))
    link.shapes = {name: (4, 3, 2), "model.not_sent": (1,)}
    with pytest.raises(
        WeightSyncError, match=rf"{name} comes with shape \[2, 3, 4\].*model has \[4, 3, 2\]"
    ):
        link.carry(0, weights)
    expect.holds(name not in link.came, f"{name} to be refused before it is handed over", link.came)
    link.shapes = {name: tuple(tensor.shape) for name, tensor in weights}
    _, received = link.carry(1, weights)
    assert_same(received[0], weights)


def test_receiving_ends_at_its_deadline(transport_subject: Subject) -> None:
    """Nothing was sent of this version: the error says so in time, even after another
    version has arrived.
    """
    link = Link(transport_subject, deadline_s=0.3)
    link.carry(0, arrays()[:2])
    start = time.monotonic()
    with pytest.raises(WaitTimeout, match="1"):
        list(link.transport.receive(link.update(1), link.receivers[0], {}))
    waited = time.monotonic() - start
    expect.holds(0.2 < waited < 5, "an error after the deadline of 0.3 s", f"{waited:.1f} s")
