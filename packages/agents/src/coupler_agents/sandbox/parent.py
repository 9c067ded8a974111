"""Start the process in bubblewrap that all interpreters are forks of."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import coupler_agents
from coupler.rewards import Limits, sandbox
from coupler.rewards.process import MARK
from coupler_agents import inside
from coupler_agents.inside import syscalls
from coupler_agents.inside.bounds import Bounds
from coupler_agents.sandbox.limits import SandboxLimits
from coupler_agents.sandbox.ran import SandboxFailed

# bubblewrap, Python and the modules of ``imports`` start within this time.
START_S = 60.0
END_S = 8.0
# Processes that belong to an interpreter beside those of the program.
OVERHEAD = 4
# Users of the parent where this process is root: none that a machine knows.
FIRST_USER = 1 << 20
USERS = 1 << 20
# Root needs no namespace of users, and keeps one that it can leave its own user in.
NAMESPACES = ("ipc", "pid", "net", "uts", "cgroup-try")
INSIDE = (
    "The sandbox of rewards has none inside: run this reward outside of it, with "
    "reward.sandbox=auto and without an attribute sandbox = True"
)
ALONE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def why_none() -> str:
    """Return why there is no sandbox for programs here, or nothing."""
    why = syscalls.why_none() or sandbox.why_no_bubblewrap() or _why_hidden()
    if why and MARK in os.environ:
        return f"{why}. {INSIDE}"
    return why


class Parent:
    """Own a process in bubblewrap, and all interpreters that it forked.

    The thread that makes it must live as long, because Linux ends the process with that
    thread.

    Attributes:
        separate: whether interpreters have namespaces of their own. Where the kernel
            allows none, a parent serves one interpreter.
    """

    def __init__(self, limits: SandboxLimits, *, separate: bool = True) -> None:
        self.separate = separate
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.leash, held = socket.socketpair()
        user = FIRST_USER + secrets.randbelow(USERS) if _is_root() else 0
        options = {
            "bounds": asdict(_bounds(limits)),
            "imports": limits.imports,
            "separate": separate,
            "user": user,
        }
        each = limits.processes + OVERHEAD
        most = Limits(max_processes=limits.interpreters * each + OVERHEAD)

        with theirs, held:
            self.process = subprocess.Popen(
                [
                    *most.watched(held.fileno()),
                    *_bubblewrap(bool(user)),
                    *(sys.executable, "-s", "-P", "-m", inside.__name__, json.dumps(options)),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[held.fileno()],
                env=_environment(),
            )
        self.control.setblocking(False)

    async def ready(self) -> None:
        """Wait until it can fork interpreters.

        Raises:
            SandboxFailed: it does not start. The text says why.
        """
        why = f"it did not start within {START_S:g} s"

        try:
            async with asyncio.timeout(START_S):
                said = await asyncio.get_running_loop().sock_recv(self.control, 1 << 16)
            first = json.loads(said) if said else {"failed": self._last_words()}
            if "failed" not in first:
                self.separate = bool(first["separate"])
                return
            why = str(first["failed"])
        except TimeoutError:
            pass

        await self.close()
        raise SandboxFailed(f"the sandbox of programs cannot be started: {why}")

    async def fork(self, descriptors: Sequence[int], fetch: Sequence[str]) -> None:
        """Have it fork an interpreter.

        Raises:
            OSError: it has ended.
        """
        message = json.dumps({"fetch": list(fetch)}).encode()
        ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        while True:
            try:
                self.control.sendmsg([message], [ancillary])
                return
            # It forks more slowly than it is asked to.
            except BlockingIOError:
                await asyncio.sleep(0.002)

    def alive(self) -> bool:
        return self.process.poll() is None

    async def close(self) -> None:
        """End it, and all that it started."""
        self.control.close()
        self.leash.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, END_S)
        if self.alive():
            self.process.kill()
        if self.process.stderr:
            self.process.stderr.close()

    def _last_words(self) -> str:
        assert self.process.stderr
        os.set_blocking(self.process.stderr.fileno(), False)
        said = (self.process.stderr.read() or b"").decode(errors="replace").strip()
        return said.splitlines()[-1][:300] if said else "it ended at once"


def _bounds(limits: SandboxLimits) -> Bounds:
    return Bounds(
        memory=int(limits.memory_gib * (1 << 30)),
        processes=limits.processes,
        tmp=limits.files_mib << 20,
    )


def _bubblewrap(is_root: bool) -> list[str]:
    folder = Path(inside.__path__[0])
    own = [folder, Path(coupler_agents.__path__[0]) / "__init__.py"]
    paths = sandbox.narrowed([*sandbox.interpreter(), *own])
    if not is_root:
        return sandbox.confined(paths, Path("/tmp"))  # noqa: S108

    namespaces = (*(f"--unshare-{name}" for name in NAMESPACES), "--hostname", "sandbox")
    return sandbox.confined(paths, Path("/tmp"), namespaces, ("CAP_SETUID", "CAP_SETGID"))  # noqa: S108


def _environment() -> dict[str, str]:
    own = Path(coupler_agents.__path__[0]).parent
    kept = {k: v for k, v in sandbox.environment().items() if not k.startswith("PYTHON")}
    path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin"))
    more = {"PATH": path, "PYTHONPATH": str(own), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**kept, **dict.fromkeys(ALONE, "1"), **more}


def _why_hidden() -> str:
    """Return why programs could not read Python, or nothing."""
    own = Path("/tmp")  # noqa: S108
    hidden = [path for path in sandbox.interpreter() if own in path.parents]
    return f"Python is in {hidden[0]}, and programs have a /tmp of their own" if hidden else ""


def _is_root() -> bool:
    """Return whether the kernel exempts this user from its limit of processes."""
    if os.getuid():
        return False
    with open("/proc/self/uid_map") as file:
        return file.read().split() == ["0", "0", "4294967295"]
