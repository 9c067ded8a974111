"""Waits are announced, bounded, and end with the root cause; no other code waits for workers."""

from __future__ import annotations

import ast
import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coupler.errors import WaitTimeout, WorkerDied
from coupler.executors import Local
from coupler.waiting import Waits

SOURCES = Path(__file__).parents[2]


def unbounded(source: str) -> Iterator[int]:
    """Lines that wait for workers without a limit: ``ray.get``, ``ray.wait`` without one, or any ``timeout=None``."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        limits = {k.arg: k.value for k in node.keywords if k.arg and k.arg.startswith("timeout")}
        if ast.unparse(node.func) in ("ray.get", "ray.wait") and "timeout" not in limits:
            yield node.lineno
        if any(isinstance(value, ast.Constant) and value.value is None for value in limits.values()):
            yield node.lineno


def test_no_source_waits_without_a_limit() -> None:
    files = [path for path in SOURCES.glob("*/src/**/*.py") if path.name != "waiting.py"]
    assert len(files) > 50
    assert not [f"{path}:{line}" for path in files for line in unbounded(path.read_text())]


@pytest.mark.parametrize(
    "line", ["ray.get(refs)", "ray.get(\n  [f(x)]\n)", "ray.wait(refs, num_returns=2)", "group.wait(timeout_s=None)"]
)
def test_the_search_finds_them(line: str) -> None:
    assert list(unbounded(line)) == [1]


async def after(seconds: float, outcome: Any) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def gather(waits: Waits, *calls: tuple[float, Any], death: tuple[float, WorkerDied] | None = None) -> list[Any]:
    async def go() -> list[Any]:
        future = asyncio.get_running_loop().create_future()
        if death:
            asyncio.get_running_loop().call_later(death[0], future.set_exception, death[1])
        try:
            return await waits.gather("policy", "train", range(len(calls)), [after(*call) for call in calls], future)
        finally:
            future.cancel()

    return asyncio.run(go())


def test_results_are_in_order() -> None:
    assert gather(Waits(5, 5), (0.02, "a"), (0.0, "b")) == ["a", "b"]


def test_the_first_failure_ends_the_wait() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="mine"):
        gather(Waits(60, 60), (60, "a"), (0.0, ValueError("mine")))
    assert time.monotonic() - start < 5


def test_a_death_explains_the_failure_of_its_peer() -> None:
    died = WorkerDied("policy rank 1 died")
    with pytest.raises(WorkerDied, match="policy rank 1 died"):
        gather(Waits(60, 60), (0.0, RuntimeError("connection closed")), (60, "b"), death=(0.3, died))


def test_a_death_elsewhere_ends_the_wait() -> None:
    with pytest.raises(WorkerDied, match="rollout"):
        gather(Waits(60, 60), (60, "a"), death=(0.05, WorkerDied("rollout replica 0 died")))


def test_the_deadline_names_what_is_outstanding() -> None:
    with pytest.raises(WaitTimeout, match=r"waited 0\.1 s for train of policy \[1, 3\]"):
        gather(Waits(0.1, 60), (0, 0), (60, 1), (0, 2), (60, 3))


def test_the_heartbeat_comes_from_a_side_thread(capfd: pytest.CaptureFixture[str]) -> None:
    """An inline call blocks the only other thread."""
    executor = Local(inline=True, waits=Waits(60, 0.1))
    handles = [executor.spawn("policy", i, f"{__file__}:Sleeper", 0.25) for i in range(2)]
    asyncio.run(executor.each(handles, "nap", [(), ()]))
    executor.close()
    assert re.search(r"coupler: waiting \d+ s for nap of policy \[0, 1\]", capfd.readouterr().err)


def test_many_calls_are_one_line() -> None:
    waits = Waits(60, 0.0)
    with waits.named("rollout", "generate", [0]), waits.named("rollout", "generate", [2]):
        assert waits.overdue() == ["waiting 0 s for generate of rollout [0, 2] (2 calls)"]
    assert waits.overdue() == []
    waits.close()


class Sleeper:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def nap(self) -> None:
        time.sleep(self.seconds)
