"""The messages that take the place of weights, and the frames between processes."""

from __future__ import annotations

import asyncio
import base64
import pickle
import socket
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from coupler.interfaces import Endpoint, WeightUpdate
from coupler_rollout_sglang import hooks, messages
from coupler_rollout_sglang.wire import Wire

UPDATE = WeightUpdate(7, "full", "a.b:C", (Endpoint("host:1"), Endpoint()), 3, 60.0, attempt=2)


def test_an_update_arrives_as_it_was_sent() -> None:
    data = messages.payload(UPDATE)
    for form in (data, base64.b64decode(data)):  # as HTTP has it, and as SGLang hands it on
        assert messages.update_of(messages.text_of(form)) == UPDATE


@pytest.mark.parametrize(
    "data", [pickle.dumps([("a", 1)]), b"", b"coupler-updat", base64.b64encode(b"{}").decode()]
)
def test_nothing_else_is_read(data: bytes | str) -> None:
    """A pickle could run anything in a model worker."""
    with pytest.raises(ValueError, match="takes weights over Coupler's transports alone"):
        messages.text_of(data)


def test_the_answers_of_one_scheduler_are_those_of_all() -> None:
    assert messages.answers_of('[{"a": 1}, {"a": 2}] | [{"a": 1}, {"a": 2}]') == [
        {"a": 1},
        {"a": 2},
    ]


def test_a_side_that_ends_before_it_reads_is_gone() -> None:
    ours, theirs = map(Wire, socket.socketpair())
    ours.send({"text": "x"})
    theirs.close()
    assert ours.receive() is None


def test_frames_keep_their_order_and_end_with_the_socket() -> None:
    ours, theirs = map(Wire, socket.socketpair())
    sent = [{"text": "x" * size} for size in (0, 1, 70_000, 3)]

    async def story() -> list[object]:
        receive, _ = await theirs.streams()
        sending = asyncio.create_task(asyncio.to_thread(send))
        found = [await receive() for _ in range(5)]
        await sending
        return found

    def send() -> None:
        for message in sent:
            ours.send(message)
        ours.close()

    assert asyncio.run(story()) == [*sent, None]
    theirs.close()


def test_a_frame_that_breaks_off_is_the_end() -> None:
    ours, theirs = map(Wire, socket.socketpair())
    ours.end.sendall(b"\x00\x00\x00\x09{")
    ours.close()
    assert theirs.receive() is None
    theirs.close()


def test_an_sglang_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang calls the hook in every engine of an environment with this package."""
    code = (
        "import sys; from coupler_rollout_sglang.hooks import install; install(); "
        "sys.exit('sglang' in sys.modules or 'torch' in sys.modules)"
    )
    monkeypatch.delenv(hooks.VARIABLE, raising=False)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    (entry,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "coupler"]
    assert entry.load() is hooks.install


def test_an_engine_of_ours_knows_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hooks.VARIABLE, "")
    hooks.Wanted(per_request_seeds=False).announce()
    assert hooks.Wanted.read() == hooks.Wanted(per_request_seeds=False)
