"""The end of a worker closes its engine, after its calls, and waits for it within
bounds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from coupler.executors import local
from coupler.executors.host import Host, Place
from coupler.executors.local import Local
from coupler.executors.waits import Waits
from coupler.interfaces import Head, Model, Rank
from coupler.testing.models import write_toy
from coupler.testing.toy import ToyEngine
from coupler.testing.toy_config import ToyEngineConfig
from coupler.worker.spec import WorkerSpec


class Closing(ToyEngine):
    """Notes what is called, in order."""

    def setup(self, rank: Rank) -> Any:
        self.calls: list[str] = []
        return super().setup(rank)

    def device_bytes(self) -> int:
        time.sleep(0.3)
        self.calls.append("device_bytes")
        return 0

    def close(self) -> None:
        self.calls.append("close")


class Failing(Closing):
    def close(self) -> None:
        raise OSError("no route to host")


class Hanging(Closing):
    def close(self) -> None:
        time.sleep(60)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(str(write_toy(tmp_path / "model", seed=0)), head=Head.LM)


def spec(model: Model, engine: str) -> WorkerSpec:
    return WorkerSpec("policy", f"{__file__}:{engine}", ToyEngineConfig(), model, None)


def started(model: Model, engine: str, inline: bool) -> tuple[Local, Any]:
    executor = Local(inline, Waits(60, 60))
    handle = executor.spawn("policy", 0, "coupler.worker.worker:Worker", spec(model, engine))
    asyncio.run(executor.call(handle, "setup", Rank()))
    return executor, handle


@pytest.mark.parametrize("inline", [True, False])
def test_an_engine_of_this_process_is_closed_after_its_calls(model: Model, inline: bool) -> None:
    executor, handle = started(model, "Closing", inline)

    async def leave() -> None:
        call = asyncio.ensure_future(executor.call(handle, "device_bytes"))
        await asyncio.wait([call], timeout=0.05)

    asyncio.run(leave())
    executor.close()
    assert handle.of.engine.calls == ["device_bytes", "close"]


@pytest.mark.parametrize(
    ("engine", "said"),
    [("Failing", "failed to close: no route to host"), ("Hanging", "did not close within 0.2 s")],
)
def test_an_engine_that_cannot_close_does_not_hold_the_run_up(
    model: Model,
    engine: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local, "LEAVE_S", 0.2)
    executor, _ = started(model, engine, inline=True)
    start = time.monotonic()
    executor.close()
    assert time.monotonic() - start < 10
    assert said in capfd.readouterr().err


def test_an_engine_in_a_process_of_its_own_is_closed(model: Model, tmp_path: Path) -> None:
    """A host redirects the output of its process, so that it gets one."""
    process = multiprocessing.get_context("spawn").Process(
        target=live, args=(tmp_path, spec(model, "Noting"))
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0, (tmp_path / "policy.log").read_text()
    assert (tmp_path / "closed").read_text() == "closed"


class Noting(Closing):
    """Leaves a file beside the model's folder."""

    def close(self) -> None:
        (Path(self.model.path).parent / "closed").write_text("closed")


def live(folder: Path, worker: WorkerSpec) -> None:
    async def life() -> None:
        host = Host(folder / "policy.log", folder, "127.0.0.1")
        assert isinstance(await host.start("coupler.worker.worker:Worker", worker), Place)
        await host.call("setup", Rank())
        await host.close()

    asyncio.run(life())
