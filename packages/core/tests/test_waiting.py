"""Waits are announced, bounded, and end with the root cause; no other code waits for
workers.
"""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coupler.conversation.episodes import OneTurn
from coupler.data import Prompt, Row
from coupler.errors import WaitTimeout, WorkerDied
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import Completion, Request
from coupler.loop.routing import Router
from coupler.loop.sampler import Scorer
from coupler.rewards import Scored

SOURCES = Path(__file__).parents[2]
NEED_A_LIMIT = {  # functions
    "ray.get", "ray.wait", "asyncio.wait", "concurrent.futures.wait", "connection.wait",
    "multiprocessing.connection.wait", "subprocess.run", "subprocess.call", "subprocess.check_call",
    "subprocess.check_output",
}  # fmt: skip
WAIT_WHERE_BARE = {
    "join",
    "wait",
    "get",
    "result",
    "recv",
    "recv_bytes",
    "accept",
    "acquire",
    "shutdown",
}  # methods
# methods; wait_for of a Condition as of asyncio
NEED_A_LIMIT_TOO = {"communicate", "wait_for"}
CALLS = "its tasks are calls of workers, which end by waits.deadline_s"
RESUMED = "resume(), or the deadline of the call that it is a part of"
GROUP = "the timeout of its process group"
TRANSPORT = "the deadline of the transport under test, which the kit sets"
BOUNDED = {  # file, call: what ends it
    (
        "waits.py",
        "asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)",
    ): "the wait for it on the next line",
    ("transfer.py", "asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)"): CALLS,
    ("transfer.py", "asyncio.wait(rest, timeout=None if died else GRACE_S)"): CALLS,
    ("rollout_group.py", "asyncio.wait(running)"): CALLS,
    ("process.py", "process.wait()"): "the wait_for around it",
    (
        "functions.py",
        "thread.submit(asyncio.run, score_all()).result()",
    ): "each call of a reward ends by its timeout_s",
    (
        "threads.py",
        "self.calls.get()",
    ): "the None that shutdown() puts, and a daemon thread otherwise",
    (
        "background.py",
        "self.calls.get()",
    ): "the None that close() puts, and a daemon thread otherwise",
    (
        "threads.py",
        "thread.join()",
    ): "the caller, who asks for it by wait=True; close() has a limit",
    (
        "buffer.py",
        "self.changed.wait_for(self.has_room)",
    ): "advance() of the trainer, which cancels it in the end",
    ("buffer.py", "self.changed.wait_for(lambda: self.failure or self._are_ready(count))"): (
        "its groups, whose calls are announced and end by waits.deadline_s and "
        "reward.timeout_s, or fail()"
    ),
    ("engine_group.py", "self.is_set_up.wait()"): "setup(), a call with a deadline",
    (
        "pool.py",
        "self._changed.wait_for(lambda: self._waiting or self._stopped)",
    ): "close(), in a daemon thread",
    ("own.py", "self.lock.acquire()"): "nobody has the lock of a folder that was just made",
    ("own.py", "self.thread.join()"): "the event before, which ends the thread",
    ("contained.py", "self.wait()"): "the limit of each call, which its supervisor keeps",
    ("test_transport_large.py", "receiving.result()"): "it has ended by then",
    ("links.py", "self.of.wait()"): "SIGKILL, which went to it before",
    ("engine.py", "engine.shutdown()"): "vLLM, which kills its processes after 5 s",
    ("gate.py", "self.server.accept()"): "its socket, which does not block",
    ("nccl.py", "work.wait()"): "it is done by then, or only queued on a stream",
    ("weights.py", "work.wait()"): GROUP,
    ("starting.py", "engine.result()"): "it has ended by then",
    ("parked.py", "preparing.result()"): "the system, which maps memory or refuses it",
    ("checkpoint.py", "self._copied.get()"): "the None that the other thread always puts",
    ("toy.py", "self.admits.wait()"): RESUMED,
    ("toy.py", "self.samples.wait()"): RESUMED,
    ("gated.py", "self.gate.wait()"): RESUMED,
    (
        "rollout.py",
        "self.idle.wait()",
    ): "the end of the engine's processes, which is looked for meanwhile",
    (
        "rollout.py",
        "self.client.idle.wait()",
    ): "the end of the engine's process, which is looked for meanwhile",
    ("test_transport.py", "meet.wait()"): "the timeout of the barrier",
    ("test_transport.py", "s.result()"): TRANSPORT,
    ("test_transport.py", "r.result()"): TRANSPORT,
    ("test_transport.py", "receiving.result()"): TRANSPORT,
    ("test_environment.py", "waits.reached.wait()"): "the wait for it on the next line",
    ("test_environment.py", "episode.result()"): "it has ended by then",
    ("interpreter.py", "asyncio.wait({task})"): "the task, which was cancelled before",
    ("interpreter.py", "self.ending.result()"): "it has ended by then",
    ("interpreter.py", "answer.result()"): "it has ended by then",
    (
        "programs.py",
        "asyncio.run_coroutine_threadsafe(self.sandbox.start(), self.loop).result()",
    ): "START_S of the sandbox",
    (
        "programs.py",
        "asyncio.run_coroutine_threadsafe(run(), self.loop).result()",
    ): "the time of each program, also of those that hold the places",
    ("sandbox.py", "self.places.acquire()"): "the episodes that hold them, which have a limit",
    ("keeper.py", "os.wait()"): "its keeper or its host, which kills it at a limit",
    ("environment.py", "self.leave.wait()"): "close()",
    ("environment.py", "self.serving.result()"): "it has ended by then",
    ("session.py", "self._leave.wait()"): "close()",
    ("search.py", "HydraConfig.get()"): "it reads a variable and waits for nothing",
    ("one_run.py", "process.wait()"): "the run of a sweep, which Ctrl-C and SIGKILL end",
}


def unbounded(source: str) -> Iterator[tuple[int, str]]:
    """(line, call) of what waits without a limit; a ``task`` of asyncio answers at
    once.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        limits = [k.value for k in node.keywords if k.arg and k.arg.startswith("timeout")]
        name, method = (
            ast.unparse(node.func),
            node.func.attr if isinstance(node.func, ast.Attribute) else "",
        )
        limits += [
            k.value for k in node.keywords if k.arg == "wait" and ast.unparse(k.value) == "False"
        ]
        bare = not node.args or ast.unparse(node.args[0]) == "True"
        bare = bare and method in WAIT_WHERE_BARE and not name.startswith("task")
        if method == "wait_for":
            limits += node.args[1:]
        needs = bare or method in NEED_A_LIMIT_TOO or name in NEED_A_LIMIT
        none = any(
            isinstance(part, ast.Constant) and part.value is None
            for limit in limits
            for part in ast.walk(limit)
        )
        if none or (needs and not limits):
            yield node.lineno, ast.unparse(node)


def test_no_source_waits_without_a_limit() -> None:
    files = list(SOURCES.glob("*/src/**/*.py"))
    found = [(path, line, call) for path in files for line, call in unbounded(path.read_text())]
    assert len(files) > 50
    assert not [
        f"{path}:{line}: {call}" for path, line, call in found if (path.name, call) not in BOUNDED
    ]
    assert BOUNDED.keys() <= {(path.name, call) for path, _, call in found}


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(refs)", "ray.get(\n  [f(x)]\n)", "ray.wait(refs, num_returns=2)",
        "group.wait(timeout_s=None)",
        "thread.join()", "event.wait()", "queue.get()", "queue.get(block=True)", "future.result()",
        "pipe.recv()",
        "lock.acquire()", "asyncio.wait(tasks)", "asyncio.wait(tasks, timeout=None if x else 1)",
        "process.wait()",
        "asyncio.wait_for(x, None)", "process.communicate(text)", "subprocess.run(command)",
        "pool.shutdown()", "pool.shutdown(wait=True)", "pool.shutdown(True)",
        "pool.shutdown(wait=wait)",
        "changed.wait_for(ready)", "changed.wait_for(ready, timeout=None)", "lock.acquire(True)",
    ],
)  # fmt: skip
def test_the_search_finds_them(line: str) -> None:
    assert [found for found, _ in unbounded(line)] == [1]


@pytest.mark.parametrize(
    "line",
    [
        "thread.join(5)", "', '.join(names)", "event.wait(5)", "settings.get(name)",
        "task.result()",
        "future.result(5)", "asyncio.wait(tasks, timeout=5)", "asyncio.wait_for(x, 5)",
        "process.communicate(timeout=5)", "subprocess.run(command, timeout=5)",
        "queue.get(timeout=5)",
        "pool.shutdown(wait=False)", "pool.shutdown(False)", "socket.shutdown(socket.SHUT_RDWR)",
        "changed.wait_for(ready, 5)", "changed.wait_for(ready, timeout=5)",
    ],
)  # fmt: skip
def test_and_nothing_else(line: str) -> None:
    assert not list(unbounded(line))


async def after(seconds: float, outcome: Any) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def gather(
    waits: Waits, *calls: tuple[float, Any], death: tuple[float, WorkerDied] | None = None
) -> list[Any]:
    async def go() -> list[Any]:
        future = asyncio.get_running_loop().create_future()
        if death:
            asyncio.get_running_loop().call_later(death[0], future.set_exception, death[1])
        try:
            return await waits.gather(
                "policy", "train", range(len(calls)), [after(*call) for call in calls], future
            )
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
        gather(
            Waits(60, 60), (0.0, RuntimeError("connection closed")), (60, "b"), death=(0.3, died)
        )


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
    with waits.named("policy", "train", range(1024)) as wait:
        assert waits.overdue() == [f"waiting 0 s for train of policy {[*range(16)]} and 1008 more"]
        assert str(wait) == f"train of policy {[*range(16)]} and 1008 more"
    waits.close()


def test_a_heartbeat_names_the_prompts_that_are_outstanding() -> None:
    waits, said = Waits(60, 0.0), list[list[str]]()

    class Parts:  # rollouts, rewards and codec
        executor = SimpleNamespace(waits=waits)
        router = Router(2)
        takes_group = False

        async def generate(self, request: Request) -> Completion:
            await asyncio.sleep(0.001 * (len(request.prompt) > 1))
            said.append(waits.overdue())
            return Completion((1,), (0.0,), (0,), "stop")

        async def score(self, *_: object) -> list[Scored]:
            return [Scored(result=1.0, seconds=0.0)]

        def decode(self, ids: object) -> str:
            return ""

    async def sample() -> None:
        parts: Any = Parts()
        scorer = Scorer(parts, parts, parts, OneTurn(parts, ()))
        prompts = [
            Prompt(Row(prompt="", answer="", index=i, extra={}), (5,) * (1 + (i == 9)))
            for i in (3, 9)
        ]
        await asyncio.gather(
            *(scorer.sample(prompt, [0, 1], Request((), 8), groups=2) for prompt in prompts)
        )

    asyncio.run(sample())
    waits.close()
    assert said[0] == ["waiting 0 s for completions of prompts [3, 9] (4 calls)"]
    assert said[-1] == ["waiting 0 s for completions of prompts [9]"]
    assert waits.overdue() == []


class Sleeper:
    def __init__(self, seconds: float) -> None:
        self.seconds, self.naps = seconds, 0
        self.began = threading.Event()

    def nap(self) -> None:
        self.began.set()
        time.sleep(self.seconds)
        self.naps += 1


def hung(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    """A toy run as a command, in a process of its own, in which the function ``what``
    never returns.
    """
    script = f"""
import sys, time
from pathlib import Path
from coupler import cli
from coupler.cli.commands import plugins
from coupler.testing.toy import ToyEngine
from toy_run import ToyRun, small

def hang(*_): time.sleep(1000)
{what} = hang
run = ToyRun(Path(sys.argv[1]), small(max_staleness=1))
run.executor.waits.deadline_s = 1.0
plugins.run = lambda _: run.run() and None
sys.exit(cli.main(["plugins"]))
"""
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False
    )


def test_an_engine_that_hangs_in_a_thread_ends_the_run(tmp_path: Path) -> None:
    ended = hung(tmp_path, "ToyEngine.step")
    assert (ended.returncode, ended.stderr) == (
        2,
        "coupler: waited 1 s for train of policy [0].\n"
        "  look at:  the log of that worker; the limit is waits.deadline_s\n",
    )


def test_the_end_waits_for_a_call_that_has_not_reached_its_deadline() -> None:
    executor = Local(inline=False, waits=Waits(60, 60))
    handle = executor.spawn("policy", 0, f"{__file__}:Sleeper", 0.5)

    async def leave() -> None:
        napping = asyncio.ensure_future(executor.call(handle, "nap"))
        for _ in range(600):  # a loaded machine starts its thread late
            await asyncio.wait([napping], timeout=0.1)
            if handle.of.began.is_set():
                return

    asyncio.run(leave())
    executor.close()
    assert handle.of.naps == 1


class Listener:
    """Has a task of its own, as the client of an inference engine has."""

    def __init__(self, spec: object) -> None:
        self.task: asyncio.Task[bool] | None = None

    async def listen(self) -> None:
        self.task = asyncio.create_task(asyncio.Event().wait())


def test_what_a_worker_left_on_its_loop_is_cancelled() -> None:
    executor = Local(inline=False, waits=Waits(60, 60))
    handle = executor.spawn("rollout", 0, f"{__file__}:Listener", None)
    asyncio.run(executor.call(handle, "listen"))
    executor.close()
    assert handle.of.task.cancelled()
