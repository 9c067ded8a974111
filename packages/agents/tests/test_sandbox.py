"""Interpreters in the sandbox: what they keep, what they are kept from, and how they
end.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import site
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hostile_programs import PROGRAMS, SECRET

from coupler.rewards import sandbox
from coupler_agents.inside import __main__ as parent
from coupler_agents.inside import syscalls
from coupler_agents.sandbox import (
    Interpreter,
    InterpreterLost,
    Sandbox,
    SandboxFailed,
    SandboxLimits,
    run_python,
)
from coupler_agents.sandbox.parent import why_none

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())
LIMITS = SandboxLimits(memory_gib=0.5, files_mib=16, output_bytes=50_000)


def within(
    play: Callable[[Sandbox], Awaitable[Any]], limits: SandboxLimits = LIMITS, separate: bool = True
) -> Any:
    """Play with a sandbox, in bounded time."""

    async def played() -> Any:
        sandbox = Sandbox(limits, separate=separate)
        await sandbox.start()
        try:
            async with asyncio.timeout(120):
                return await play(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(played())


async def said(interpreter: Interpreter, code: str, seconds: float = 20.0) -> str:
    return (await interpreter.call(code, seconds)).text


@pytest.mark.parametrize("separate", [True, False])
def test_state_is_kept_over_calls(separate: bool) -> None:
    """A last expression is shown as an interactive interpreter shows it."""

    async def play(sandbox: Sandbox) -> list[str]:
        interpreter = await sandbox.interpreter()
        calls = [
            "import math\nx = math.sqrt(16)\nprint('set')",
            "x",
            "x = None",
            "x",
            "def f(n):\n    return 1 / n\nopen('a.txt', 'w').write('kept')",
            "print('before')\nf(0)",
            "open('a.txt').read()",
            "print(1)\n2",
            "2 +",
            "",
        ]
        return [await said(interpreter, code) for code in calls]

    found = within(play, separate=separate)
    assert found[:5] == ["set", "4.0", "", "", "4"]
    assert found[6:8] == ["'kept'", "1\n2"]
    # Newer versions of Python mark more of a line.
    unmarked = [line for line in found[5].splitlines() if line.strip(" ^~")]
    assert unmarked == [
        *("before", "Traceback (most recent call last):"),
        *('  File "<call 6>", line 2, in <module>', "    f(0)"),
        *('  File "<call 5>", line 2, in f', "    return 1 / n"),
        "ZeroDivisionError: division by zero",
    ]
    assert found[8].endswith("SyntaxError: invalid syntax") and "inside" not in found[8]
    assert found[9] == ""


def test_output_is_in_the_order_of_writing() -> None:
    async def play(sandbox: Sandbox) -> str:
        return await said(
            await sandbox.interpreter(),
            "import sys, os\nprint('a')\nprint('b', file=sys.stderr)\nprint('c', flush=True)\n"
            "os.system('echo d')\nprint('e', end='')",
        )

    assert within(play) == "a\nb\nc\nd\ne"


@pytest.mark.parametrize("separate", [True, False])
def test_interpreters_do_not_see_each_other(separate: bool) -> None:
    """Neither files nor variables, processes, sockets nor shared memory."""
    shared = "/dev/shm" if separate else "/tmp"

    async def play(sandbox: Sandbox) -> list[str]:
        one, two = await sandbox.interpreter(), await sandbox.interpreter()
        await said(
            one,
            "import socket, subprocess, sys\nx = 1\nopen('/tmp/a', 'w').write('x')\n"
            f"open('{shared}/a', 'w').write('x')\n"
            "s = socket.socket(socket.AF_UNIX)\ns.bind('\\0name')\ns.listen()\n"
            "p = subprocess.Popen(['sleep', '60'])",
        )
        found = [
            await said(
                two,
                "import os\nfound = [os.path.exists(p) for p in ('/tmp/a', '/dev/shm/a')]\n"
                "found + ['x' in globals()]",
            ),
            await said(two, "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0name')"),
            await said(two, f"import os\nos.kill({await said(one, 'p.pid')} + 1000, 0)"),
        ]
        await one.close()
        third = await sandbox.interpreter()
        return [*found, await said(third, "import os\nos.listdir('/tmp')")]

    files, socket, process, third = within(play, separate=separate)
    assert files == "[False, False, False]" and third == "[]"
    assert "ConnectionRefusedError" in socket and "ProcessLookupError" in process


def test_random_numbers_differ() -> None:
    async def play(sandbox: Sandbox) -> list[str]:
        code = "import random\nrandom.random()"
        return [await said(await sandbox.interpreter(), code) for _ in range(3)]

    found = within(play, SandboxLimits(imports=("random",)))
    assert len(set(found)) == 3


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_costs_its_own_interpreter(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A neighbour and the sandbox go on, and nothing of the run is read."""
    monkeypatch.setenv("COUPLER_KEY", SECRET)
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    code, end = PROGRAMS[name]

    async def play(sandbox: Sandbox) -> None:
        neighbour, interpreter = await sandbox.interpreter(), await sandbox.interpreter()
        await said(neighbour, "x = 41\nopen('x', 'w').write('1')")
        parent = sandbox.parent
        try:
            found = ended = await said(interpreter, code, 1.0 if end == "slow" else 60.0)
        except InterpreterLost as lost:
            found, ended = lost.output, "slow" if lost.timed_out else "lost"
        assert end in ended, found
        assert SECRET not in found
        assert len(found) < 120_000

        assert await said(neighbour, "x + int(open('x').read())") == "42"
        assert await said(await sandbox.interpreter(), "1 + 1") == "2"
        assert sandbox.parent is parent and parent and parent.alive()
        await interpreter.close()

    within(play)


WITHOUT_WALLS = (
    "kill itself", "close all", "write everywhere", "ignored signals", "memory of children",
    "delete files", "fill the disk", "read what is there", "environment", "environment of others",
    "signals to all", "signals to numbers", "kill its parent", "trace", "namespaces",
    "become root", "network", "loopback", "forks", "endless forks", "session of its own",
)  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_WALLS)
def test_a_program_in_a_bubblewrap_of_its_own_ends_at_most_that(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the sandbox's own processes, but neither a neighbour nor the run."""
    monkeypatch.setenv("COUPLER_KEY", SECRET)
    code, end = PROGRAMS[name]

    async def play(sandbox: Sandbox) -> None:
        neighbour, interpreter = await sandbox.interpreter(), await sandbox.interpreter()
        await said(neighbour, "x = 41\nopen('x', 'w').write('1')")
        try:
            found = await said(interpreter, code, 1.0 if end == "slow" else 60.0)
        except InterpreterLost as lost:
            found = lost.output
        assert SECRET not in found
        assert await said(neighbour, "x + int(open('x').read())") == "42"
        assert await said(await sandbox.interpreter(), "1 + 1") == "2"

    within(play, separate=False)


def test_no_file_of_the_user_is_readable(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    here = Path(__file__)
    for path in (secret, here, Path.home(), Path("/etc/hostname"), Path("/root/.ssh")):
        ran = run_python(f"import os\nprint(os.path.isfile({str(path)!r}))\nopen({str(path)!r})")
        assert ran.stdout == "False\n" and "Error" in ran.stderr and ran.code == 1, path


def processes_with(argument: bytes) -> int:
    found = 0
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += argument in process.read_bytes().split(b"\0")
        except OSError:
            continue
    return found


async def until_left(argument: bytes, number: int) -> None:
    """Wait until so many processes have an argument."""
    async with asyncio.timeout(10):
        while processes_with(argument) != number:
            await asyncio.sleep(0.02)


def test_nothing_is_left_of_an_interpreter() -> None:
    """What a program started ends with its interpreter, or with the sandbox."""
    code = "import subprocess\nfor _ in range(3): subprocess.Popen(['sleep', '4711'])"

    async def play(sandbox: Sandbox) -> None:
        interpreter = await sandbox.interpreter()
        await said(interpreter, code)
        await until_left(b"4711", 3)
        await interpreter.close()
        await until_left(b"4711", 0)
        await said(await sandbox.interpreter(), code)
        await until_left(b"4711", 3)

    within(play)
    asyncio.run(until_left(b"4711", 0))


@pytest.mark.parametrize("separate", [True, False])
def test_what_is_left_running_stands_still_between_calls(separate: bool) -> None:
    """Threads and processes, of which some fork, go on in the next call."""
    code = (
        "import os, threading, time\nn = 0\ndef count():\n  global n\n  while True:\n"
        "    n += 1; time.sleep(0.001)\nthreading.Thread(target=count, daemon=True).start()\n"
        "if not os.fork():\n  while True:\n    with open('m', 'a') as f: f.write('x')\n"
        "    time.sleep(0.001)\n"
        "if not os.fork():\n  while True:\n    if not os.fork(): time.sleep(0.01); os._exit(0)\n"
        "    os.wait()"
    )
    count = "(n, os.path.getsize('m'))"

    async def play(sandbox: Sandbox) -> None:
        interpreter = await sandbox.interpreter()
        await said(interpreter, code + "\ntime.sleep(0.2)")
        before = pair(await said(interpreter, count))
        await asyncio.sleep(1.0)
        still = pair(await said(interpreter, count))
        after = pair(await said(interpreter, f"time.sleep(0.5)\n{count}"))
        assert all(now - then < 100 for now, then in zip(still, before, strict=True))
        assert all(now - then > 100 for now, then in zip(after, still, strict=True))

    within(play, separate=separate)


def pair(text: str) -> list[int]:
    return [int(number) for number in text.strip("()").split(",")]


def test_a_sandbox_that_was_killed_is_started_again() -> None:
    async def play(sandbox: Sandbox) -> list[str]:
        interpreter = await sandbox.interpreter()
        assert sandbox.parent
        sandbox.parent.process.kill()
        with pytest.raises(InterpreterLost, match="was ended with the sandbox"):
            await said(interpreter, "while True: pass")
        return [await said(await sandbox.interpreter(), "1 + 1")]

    assert within(play) == ["2"]


def test_without_descriptors_it_is_no_fault_of_the_program() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def play(sandbox: Sandbox) -> None:
        used = len(os.listdir("/proc/self/fd"))
        taken: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, hard))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(2))
            os.close(taken.pop())
            with pytest.raises(SandboxFailed, match="ulimit -n"):
                await sandbox.interpreter()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in taken:
                os.close(descriptor)
        assert len(os.listdir("/proc/self/fd")) == used
        assert await said(await sandbox.interpreter(), "1 + 1") == "2"

    within(play)


def test_a_call_that_is_cancelled_ends_its_interpreter() -> None:
    async def play(sandbox: Sandbox) -> None:
        interpreter = await sandbox.interpreter()
        call = asyncio.create_task(said(interpreter, "while True: pass"))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert interpreter.closed
        assert await said(await sandbox.interpreter(), "1 + 1") == "2"

    within(play, SandboxLimits(interpreters=1))


def test_interpreters_wait_for_places() -> None:
    async def play(sandbox: Sandbox) -> None:
        one, _ = await sandbox.interpreter(), await sandbox.interpreter()
        waiting = asyncio.create_task(sandbox.interpreter())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await one.close()
        assert await said(await waiting, "1 + 1") == "2"

    within(play, SandboxLimits(interpreters=2))


def test_descriptors_are_given_back() -> None:
    def held() -> int:
        gc.collect()  # Else what other tests left goes at any time.
        return len(os.listdir("/proc/self/fd"))

    async def play(sandbox: Sandbox) -> None:
        for round_ in range(2):
            for code in ("1", "import os\nos._exit(1)"):
                interpreter = await sandbox.interpreter()
                try:
                    await said(interpreter, code)
                except InterpreterLost:
                    continue
                finally:
                    await interpreter.close()
            if not round_:
                before = held()
        assert held() == before

    within(play)


def test_an_import_that_fails_is_one_sentence() -> None:
    with pytest.raises(SandboxFailed, match="cannot be started: ModuleNotFoundError: No module"):
        run_python("", limits=SandboxLimits(imports=("no_such_module",)))


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_the_numbers_of_system_calls_are_those_of_libseccomp(machine: str) -> None:
    seccomp = pytest.importorskip("pyseccomp")
    column, _ = syscalls.MACHINES[machine]
    arch = getattr(seccomp.Arch, machine.upper())
    named = syscalls.denied() | {
        "clone": syscalls.CLONE,
        "clone3": syscalls.CLONE3,
        "socket": syscalls.SOCKET,
    }
    for name, numbers in named.items():
        found = seccomp.resolve_syscall(arch, name)
        # An older library lacks the newest, and gives a number below 0.
        assert found == numbers[column] or found < 0, name
    assert len(syscalls.program(machine)) % 8 == 0


@pytest.mark.parametrize("installed", [True, False])
def test_programs_import_what_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of this package is theirs only where it holds all packages."""
    monkeypatch.setenv("PYTHONPATH", "/packages")
    monkeypatch.setattr(sys, "path", ["/packages", "/lib"])
    monkeypatch.setattr(site, "getsitepackages", lambda: ["/packages"] if installed else [])
    parent._set_path()
    assert sys.path == (["/tmp", "/lib", "/packages"] if installed else ["/tmp", "/lib"])


def test_python_in_the_folder_of_programs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "interpreter", lambda: [Path("/usr"), Path("/tmp/venv")])
    assert why_none() == "Python is in /tmp/venv, and programs have a /tmp of their own"


ORDINARY: dict[str, tuple[str, str]] = {
    "a package": ("import numpy as np\nint(np.ones((9, 9)).sum())", "81"),
    "a pool": (
        "import multiprocessing\ndef f(x): return x * x\n"
        "with multiprocessing.Pool(2) as pool: found = pool.map(f, range(4))\nfound",
        "[0, 1, 4, 9]",
    ),
    "a thread": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor() as pool: found = list(pool.map(abs, [-1]))\nfound",
        "[1]",
    ),
    "a program": (
        "import subprocess, sys\nopen('a.py', 'w').write('print(input()[::-1])')\n"
        "subprocess.run([sys.executable, 'a.py'], input=b'abc', capture_output=True).stdout",
        r"b'cba\n'",
    ),
    "a module": ("open('own.py', 'w').write('y = 5')\nimport own\nown.y", "5"),
    "a coroutine": ("import asyncio\nasync def f(): return 3\nasyncio.run(f())", "3"),
    "a class": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\nP(3)",
        "P(x=3)",
    ),
    "a database": (
        "import sqlite3\nsqlite3.connect('x.db').execute('select 1').fetchall()",
        "[(1,)]",
    ),
    "its source": ("import inspect\ndef f(): return 1\ninspect.getsource(f)", "return 1"),
    "no input": ("input()", "EOFError"),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_work(name: str) -> None:
    code, shown = ORDINARY[name]

    async def play(sandbox: Sandbox) -> str:
        return await said(await sandbox.interpreter(), code)

    assert shown in within(play)


def test_nothing_is_left_of_a_run_that_was_killed() -> None:
    code = (
        "import asyncio, os\nfrom coupler_agents.sandbox import Sandbox, SandboxLimits\n"
        "async def main():\n"
        "    sandbox = Sandbox(SandboxLimits())\n    await sandbox.start()\n"
        "    python = await sandbox.interpreter()\n"
        '    code = \'import subprocess\\nsubprocess.Popen(["sleep", "4712"])\'\n'
        "    await python.call(code, 20.0)\n    os.kill(os.getpid(), 9)\nasyncio.run(main())"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == -9
    asyncio.run(until_left(b"4712", 0))
