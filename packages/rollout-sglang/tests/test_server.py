"""SGLang's own HTTP server: one that runs already, and takes requests with its key."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from coupler.errors import CouplerError, ReplicaDied
from coupler.interfaces import InFlight, Model, Rank, Request
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.reference import TransformersReference
from coupler_rollout_sglang.config import Mode, SGLangConfig
from coupler_rollout_sglang.links import KEY_VARIABLE, LOOPBACK, HttpLink, free_port
from coupler_rollout_sglang.rollout import SGLangRollout

KEY = "a key of more than 16 characters"
START_S = 300.0


@pytest.fixture(scope="module")
def server(
    kernels: None, reference: TransformersReference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server that a user started, and its process."""
    port = free_port()
    command = [sys.executable, "-m", "coupler_rollout_sglang.server", str(reference.folder)]
    with subprocess.Popen(
        [*command, str(port), "dtype=fp32"],
        env={**os.environ, KEY_VARIABLE: KEY},
        cwd=tmp_path_factory.mktemp("server"),
    ) as process:
        yield f"http://127.0.0.1:{port}", process
        with suppress(ProcessLookupError):
            process.kill()


def rollout(url: str, reference: TransformersReference) -> SGLangRollout:
    config = SGLangConfig(mode=Mode.SERVER, server=url)
    return SGLangRollout(config, Model(str(reference.folder)))


@pytest.mark.slow
def test_a_server_that_runs(
    server: tuple[str, subprocess.Popen[bytes]],
    reference: TransformersReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The right key samples and updates, another one is refused, and its end is
    noticed.
    """
    url, process = server
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    served = connected(url, process, reference)
    try:
        _, receipt = served.push((n, torch.from_numpy(t)) for n, t in reference.tensors.items())
        assert (receipt.missing, receipt.unexpected) == ((), ())
        request = Request((5, 6, 7), 12, 0.7, seed=3)
        done = served.run(lambda: served.rollout.generate(request))
        want = reference.logprobs_of(request.prompt, done.tokens, 0.7)
        assert np.abs(want - done.logprobs).max() < 2e-3
        assert set(done.versions) == {0}

        # As a run leaves it that is killed amid a sync.
        served.run(lambda: served.rollout.pause(InFlight.STALE_KV))
        asyncio.run(sampled(rollout(url, reference), request))

        monkeypatch.setenv(KEY_VARIABLE, "another key of 16 characters")
        with pytest.raises(CouplerError, match=f"(?s)takes another key.*{KEY_VARIABLE}"):
            asyncio.run(started(rollout(url, reference)))

        process.kill()
        start = time.monotonic()
        with pytest.raises(ReplicaDied):
            served.run(lambda: served.rollout.pause(InFlight.DRAIN))
        assert time.monotonic() - start < 30
    finally:
        served.close()


async def sampled(one: SGLangRollout, request: Request) -> None:
    try:
        await one.setup(Rank())
        await asyncio.wait_for(one.generate(request), 60)
    finally:
        one.close()


async def started(one: SGLangRollout) -> None:
    try:
        await one.setup(Rank())
    finally:
        one.close()


def connected(
    url: str, process: subprocess.Popen[bytes], reference: TransformersReference
) -> Served:
    """Connect as soon as the server answers."""
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "the server ended"
        try:
            return Served(rollout(url, reference), Plugins.load().get("transport", "disk"))
        except CouplerError as error:
            if "no SGLang server answers" not in str(error) or time.monotonic() > until:
                raise


def test_a_server_that_does_not_run_is_named(reference: TransformersReference) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CouplerError, match=f"no SGLang server answers at {url}"):
        asyncio.run(started(rollout(url, reference)))


@pytest.mark.parametrize("ended", [False, True])
def test_a_link_closes_its_connections_also_when_its_event_loop_ended(ended: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        # The link's end closes it.
        assert not await reader.read()
        writer.close()

    async def story() -> HttpLink:
        server = await asyncio.start_server(answer, LOOPBACK, 0)
        link = HttpLink(f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}", {})
        await link.ready()
        if not ended:
            link.close()
        server.close()
        return link

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        link = asyncio.run(story())
        link.close()
        assert link.session is not None and link.session.closed
        del link
        gc.collect()
    said = [str(warning.message) for warning in caught]
    assert not [text for text in said if "never awaited" in text or "Unclosed" in text]


@pytest.mark.parametrize(
    ("words", "key", "sentence"),
    [
        ([], KEY, "coupler_rollout_sglang.server MODEL PORT"),
        (["MODEL", "port"], KEY, "coupler_rollout_sglang.server MODEL PORT"),
        (["MODEL", "1"], "short", f"{KEY_VARIABLE} must have a key of 16 characters"),
        (["no-model", "1"], KEY, "model.path=no-model has no readable config.json"),
        (
            ["MODEL", "1", "tensor_paralel=2"],
            KEY,
            "tensor_paralel=2 is no option of rollout=sglang",
        ),
        (["MODEL", "1", "dtype=fp64"], KEY, "'fp64' is not a valid Precision"),
        (["MODEL", "1", "tensor_parallel=two"], KEY, "two is no value in JSON"),
        (["MODEL", "1", "tensor_parallel=0"], KEY, "rollout.tensor_parallel must be at least 1"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    words: list[str], key: str, sentence: str, reference: TransformersReference, tmp_path: Path
) -> None:
    given = [str(reference.folder) if word == "MODEL" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "coupler_rollout_sglang.server", *given],
        env={**os.environ, KEY_VARIABLE: key},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
