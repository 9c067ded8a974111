"""Storages that leave their memory for the host come back whole."""

from __future__ import annotations

from threading import Event

import pytest
import torch

from coupler.engine_kit import pinned
from coupler.engine_kit.parked import Keep, Parked
from coupler.errors import CouplerError
from coupler.system import process_memory


def test_storages_come_back_behind_every_view() -> None:
    buffer = torch.arange(12.0)
    views = [buffer[:4].view(2, 2), buffer[4:]]
    alone = torch.ones(3, dtype=torch.bfloat16)
    parked = Parked()
    for _ in range(2):  # what is away already stays as it is
        parked.offload("params", [*views, alone])
    assert {tensor.untyped_storage().nbytes() for tensor in (buffer, *views, alone)} == {0}
    parked.onload("params")
    parked.onload("params")
    assert torch.equal(buffer, torch.arange(12.0))
    assert torch.equal(views[1], torch.arange(4.0, 12.0))
    assert torch.equal(alone, torch.ones(3, dtype=torch.bfloat16))
    assert parked.copied == 2 * (48 + 6)


def test_names_are_apart() -> None:
    one, two = torch.ones(5), torch.full((7,), 2.0)
    parked = Parked()
    parked.offload("one", [one])
    parked.offload("two", [two])
    parked.onload("one")
    assert one.tolist() == [1.0] * 5 and two.untyped_storage().nbytes() == 0
    parked.onload("two")
    assert two.tolist() == [2.0] * 7


def test_what_grows_gets_more_room() -> None:
    parked, tensors = Parked(), [torch.ones(4)]
    for size in (4, 400_000, 4):
        parked.offload("grads", tensors)
        parked.onload("grads")
        assert all(bool((tensor == 1).all()) for tensor in tensors)
        tensors.append(torch.ones(size))
    assert parked.allocated == 16 + 528 + 1024 + 1_600_000
    parked.offload("grads", [])
    parked.onload("grads")


def test_nothing_is_kept_of_what_comes_back_as_zeros() -> None:
    parked, tensor = Parked(), torch.ones(4)
    parked.offload("grads", [tensor], Keep.NOTHING)
    parked.onload("grads")
    assert tensor.tolist() == [0.0] * 4 and parked.copied == parked.allocated == 0


def test_what_is_the_same_is_copied_out_once_until_it_is_forgotten() -> None:
    parked, tensor = Parked(), torch.ones(4)
    for _ in range(3):
        parked.offload("frozen", [tensor], Keep.SAME)
        parked.onload("frozen")
    assert parked.copied == 16 + 3 * 16
    other = torch.full((4,), 3.0)
    parked.offload("frozen", [other], Keep.SAME)  # other storages
    parked.onload("frozen")
    assert other.tolist() == [3.0] * 4

    tensor.fill_(5.0)
    parked.forget()
    parked.offload("frozen", [tensor], Keep.SAME)
    parked.onload("frozen")
    assert tensor.tolist() == [5.0] * 4


def test_what_was_copied_leaves_without_a_copy() -> None:
    """The host's numbers are those of every view, until somebody forgets them."""
    parked, buffer = Parked(), torch.arange(6.0)
    assert parked.on_host(buffer) is None
    parked.copy("params", [buffer])
    (there,) = (each for each in [parked.on_host(buffer[2:5])] if each is not None)
    assert there.tolist() == [2.0, 3.0, 4.0]
    assert there.data_ptr() != buffer[2:5].data_ptr() and parked.on_host(there) is there

    parked.offload("params", [buffer], Keep.SAME)
    assert parked.copied == 24 and parked.on_host(buffer) is not None
    parked.onload("params")
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    parked.forget("grads")
    assert parked.on_host(buffer) is not None
    parked.forget("params")
    assert parked.on_host(buffer) is None


def test_nothing_is_written_over_what_is_read() -> None:
    parked, tensor, ended = Parked(), torch.ones(4), []
    parked.offload("params", [tensor], Keep.SAME)
    parked.onload("params")
    parked.read_by(lambda: ended.append(True))
    parked.offload("params", [tensor], Keep.SAME)
    parked.onload("params")
    assert not ended, "nothing was written to the host"
    parked.forget("params")
    parked.offload("params", [tensor], Keep.SAME)
    parked.onload("params")
    parked.settle()
    assert ended == [True]


def test_a_host_with_too_little_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "free_bytes", lambda: 100)
    parked, tensor = Parked(), torch.ones(1000)
    with pytest.raises(CouplerError, match=r"host memory .*\n  try:  offload=false"):
        parked.offload("params", [tensor])
    assert tensor.tolist() == [1.0] * 1000, "what could not leave is still there"


def test_what_found_no_room_is_copied_out_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parked, small, large = Parked(), torch.ones(4), torch.ones(1000)
    parked.offload("frozen", [small], Keep.SAME)
    parked.onload("frozen")
    with monkeypatch.context() as patched:
        patched.setattr(process_memory, "free_bytes", lambda: 100)
        with pytest.raises(CouplerError, match="host memory"):
            parked.offload("frozen", [small, large], Keep.SAME)

    parked.offload("frozen", [small], Keep.SAME)
    parked.onload("frozen")
    assert small.tolist() == [1.0] * 4


class Held:
    """Memory that is mapped only once a test lets go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.ended = Event(), Event(), Event()
        whole = pinned._map

        def later(memory: torch.Tensor) -> None:
            self.begun.set()
            assert self.go_on.wait(60)
            whole(memory)
            self.ended.set()

        monkeypatch.setattr(pinned, "_map", later)


def test_a_first_departure_finds_its_memory_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller goes on meanwhile, and the copy waits for the rest."""
    held, parked, tensor = Held(monkeypatch), Parked(), torch.ones(1000)
    for _ in range(2):
        parked.prepare("params", [tensor])
    assert held.begun.wait(60) and parked.allocated == 4000

    tensor.fill_(3.0)
    held.go_on.set()
    parked.offload("params", [tensor])
    assert held.ended.is_set()
    parked.prepare("params", [tensor])
    parked.onload("params")
    assert bool((tensor == 3).all()) and parked.allocated == 4000


def test_what_is_away_already_can_be_prepared() -> None:
    parked, tensor = Parked(), torch.ones(1000)
    parked.offload("optimizer", [tensor], Keep.NOTHING)
    parked.prepare("optimizer", [tensor])
    assert parked.allocated == 4000
    parked.onload("optimizer")
    parked.offload("optimizer", [tensor.fill_(2.0)], Keep.SAME)
    parked.onload("optimizer")
    assert bool((tensor == 2).all()) and parked.allocated == 4000


def test_what_grew_since_it_was_prepared_gets_more_room() -> None:
    parked, tensors = Parked(), [torch.ones(4)]
    parked.prepare("grads", tensors)
    parked.prepare("empty", [torch.empty(0)])
    tensors.append(torch.ones(1000))
    parked.offload("grads", tensors)
    parked.onload("grads")
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_an_error_of_the_thread_reaches_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later try allocates anew."""
    parked, tensor = Parked(), torch.ones(1000)
    with monkeypatch.context() as patched:
        patched.setattr(process_memory, "free_bytes", lambda: 100)
        parked.prepare("params", [tensor])
        with pytest.raises(CouplerError, match=r"host memory .*\n  try:  offload=false"):
            parked.offload("params", [tensor])
    assert tensor.tolist() == [1.0] * 1000

    parked.offload("params", [tensor])
    parked.onload("params")
    assert tensor.tolist() == [1.0] * 1000


def test_memory_that_is_still_mapped_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "free_bytes", lambda: 5000)
    held, parked = Held(monkeypatch), Parked()
    parked.prepare("optimizer", [torch.ones(1000)])
    assert held.begun.wait(60)
    with pytest.raises(CouplerError, match="host memory"):
        parked.offload("params", [torch.ones(1000)])

    held.go_on.set()
    parked.offload("optimizer", [torch.ones(1000)])
    parked.offload("params", [torch.ones(1000)])
    assert pinned.promised.bytes == 0


def test_a_close_waits_for_no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    held, parked = Held(monkeypatch), Parked()
    for what in ("params", "optimizer"):
        parked.prepare(what, [torch.ones(1000)])
    assert held.begun.wait(60)
    parked.close()
    assert not held.ended.is_set()
    held.go_on.set()
    assert held.ended.wait(60)


def test_pages_are_mapped_and_hold_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "PIECE", 2 * pinned.PAGE)
    size = 3 * pinned.PAGE * pinned.THREADS + 17
    memory = pinned.PinnedMemory(size)
    assert memory.bytes.numel() == size and not memory.bytes.any()
    memory.bytes.fill_(7)
    assert int(memory.bytes.sum(dtype=torch.int64)) == 7 * size
