"""Processes of a run that are stopped, killed, or lose what they hold, at any moment.

A toy job runs in processes of its own, with ``executor=ray`` or ``executor=local``. The
run must go on, or end in one sentence. It must leave no process, and the same command
afterwards must finish with the numbers of an undisturbed run:

    python -m tests.faults.processes SEED CASES
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import run
from tests.faults.strangers import STRANGERS, Crowd
from tests.faults.toy_runs import arguments, steps, write_inputs
from tests.listeners import listeners

from coupler.system.processes import Process, end_all_of

# a run that is disturbed ends by then, also on a machine that does much else
END_S = float(os.environ.get("COUPLER_FAULT_END_S", "180"))
# and what it started ends soon after it
ORPHANS_S = 30.0
POLL_S = 0.05
REWARD = """
import time

def score(completion):
    time.sleep(0.02)
    return len(set(completion)) / (1 + len(completion))
"""
COMMON = ("steps=5", "waits.heartbeat_s=1", "waits.deadline_s=60", "sync.deadline_s=30",
          "reward.timeout_s=5", "checkpoint.export=false")  # fmt: skip
RAY = ("executor=ray", "rollout.replicas=2", "ray.placement=disjoint")

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGABRT", "SIGHUP", "SIGQUIT",
           "SIGSTOP", "SIGTSTP", "SIGSTOP for 0.3 s", "SIGSTOP for 4 s")  # fmt: skip
OF_LOCAL = {"driver": "coupler.cli", "reward worker": "coupler.rewards.worker"}
OF_RAY = {
    **OF_LOCAL,
    "policy-0": "",
    "rollout-0": "",
    "rollout-1": "",
    "raylet": "raylet/raylet",
    "gcs_server": "gcs/gcs_server",
    "log monitor": "log_monitor",
    "autoscaler": "monitor.py",
    "dashboard": "dashboard.py",
    "dashboard agent": "DashboardAgent",
    "environment agent": "RuntimeEnvAgent",
    "watcher": "system/processes.py",
}
# what it does to rewards is of the user's function
CHANGES_REWARDS = "reward worker"


@dataclass
class Run:
    """A command under way, and every process that it was seen to have."""

    folder: Path
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    seen: dict[int, Process] = field(default_factory=dict)

    def __enter__(self) -> Run:
        self.said = self.folder.with_suffix(".txt")
        with self.said.open("ab") as said:
            self.popen = subprocess.Popen(
                [*self.wrapper, sys.executable, "-m", "coupler.cli", *self.argv],
                stdout=said,
                stderr=said,
                start_new_session=True,
                env={**os.environ, "RAY_worker_niceness": "0", **self.environment},
            )
        self.over = threading.Event()
        self.looking = threading.Thread(target=self._look, daemon=True)
        self.looking.start()
        return self

    def _look(self) -> None:
        while not self.over.wait(POLL_S):
            self.seen |= descendants(self.popen.pid)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.looking.join()
        for process in (Process.of(self.popen.pid), *self.seen.values()):
            process.kill()
        self.popen.wait()

    def steps_done(self) -> int:
        with suppress(OSError):
            return len((self.folder / "metrics.jsonl").read_text().splitlines())
        return 0

    def wait(self, seconds: float) -> int | None:
        """Return the code with which it ended, or None if it has not."""
        with suppress(subprocess.TimeoutExpired):
            return self.popen.wait(seconds)
        return None

    def left(self) -> list[str]:
        """Return what is alive ``ORPHANS_S`` after the end."""
        end = time.monotonic() + ORPHANS_S
        while alive := [p for p in self.seen.values() if not p.has_ended()]:
            if time.monotonic() > end:
                return [f"{title(p.pid)} ({p.state})" for p in alive]
            time.sleep(POLL_S)
        return []

    def find(self, target: str) -> Process | None:
        """Return the process of a role, or of Ray, if there is one now."""
        if target == "driver":
            return Process.of(self.popen.pid)
        if not OF_RAY[target]:
            with suppress(OSError, IndexError):
                log = (self.folder / "logs" / f"{target}.log").read_text()
                return Process.of(int(re.findall(r"pid (\d+) on node", log)[-1]))
            return None
        found = (p for p in self.seen.values() if OF_RAY[target] in title(p.pid))
        return next((p for p in found if not p.has_ended()), None)


def title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def descendants(pid: int) -> dict[int, Process]:
    """Return every process below one, by number."""
    found: dict[int, Process] = {}
    todo = [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children = [int(word) for word in task.read_text().split()]
                found |= {child: Process.of(child) for child in children}
                todo += children
    return found


Disturb = Callable[[Run, random.Random], str]


def signalled(target: str, how: str) -> Disturb:
    """Send a signal to a process of the run, and SIGCONT later if ``how`` says so."""
    name, _, pause = how.partition(" for ")

    def act(to: Run, chance: random.Random) -> str:
        end = time.monotonic() + END_S
        while (process := to.find(target)) is None:
            if to.popen.poll() is not None or time.monotonic() > end:
                return ""
            time.sleep(POLL_S)
        with suppress(ProcessLookupError):
            os.kill(process.pid, getattr(signal, name))
            if pause:
                time.sleep(float(pause.removesuffix(" s")))
                os.kill(process.pid, signal.SIGCONT)
        return ""

    return act


def removed(what: str) -> Disturb:
    """Remove files of the Ray session below the run."""

    def act(to: Run, chance: random.Random) -> str:
        for folder in Path(to.environment["TMPDIR"]).glob("coupler-ray-*"):
            for path in folder.glob(what):
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return ""

    return act


def accompanied(same: bool) -> Disturb:
    """Start the command again while it runs, with the same run folder or another."""

    def act(to: Run, chance: random.Random) -> str:
        folder = to.folder.with_name(f"{to.folder.name}-second")
        other = [f"run_dir={folder}" if word.startswith("run_dir=") else word for word in to.argv]
        with Run(folder, to.argv if same else other, to.environment) as second:
            code = second.wait(END_S)
            words = second.said.read_text(errors="replace")
            if left := second.left():
                return f"{len(left)} processes of the second are left"
        good = code == 0 or (same and code == 2 and "is in use by" in words)
        return "" if good else f"the second ended with code {code}: {last(words)}"

    return act


def besieged(flood: int) -> Disturb:
    """Let strangers in on every port of the run, until it ends."""

    def act(to: Run, chance: random.Random) -> str:
        found = listeners(to.popen.pid, to.folder / "logs")
        ports = {int(each.address.rpartition(":")[2]) for each in found if each.kind == "tcp"}
        kinds = chance.sample(sorted(STRANGERS), 8)
        crowds = [Crowd(port, kinds, flood, chance.randrange(1 << 30)) for port in sorted(ports)]
        for crowd in crowds:
            crowd.come()
        to.wait(END_S)
        for crowd in crowds:
            crowd.leave()
        return ""

    return act


def nothing(to: Run, chance: random.Random) -> str:
    return ""


@dataclass(frozen=True)
class Case:
    """One fault: what surrounds the run, and what happens in it."""

    name: str
    ray: bool
    disturb: Disturb = nothing
    more: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    around: Callable[[Path], Process | None] | None = None
    refused: str = ""
    comparable: bool = True
    finishes: bool = False


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """Listen, say ``answer`` to everybody if there is one, and stay."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if answer is not None:
                        held[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for each in held:
            each.close()


def leftover(kind: str) -> Callable[[Path], Process | None]:
    """Lay what a run that was killed leaves into the temporary folder."""

    def lay(temporary: Path) -> Process | None:
        folder = temporary / "coupler-ray-left"
        if kind == "a file":
            folder.write_text("")
            return None
        (folder / "session_x" / "sockets").mkdir(parents=True)
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(folder / "session_x" / "sockets" / "raylet"))
        server.close()
        stopped = None
        if kind == "a process":
            command = ["sleep", "600"]
            with (folder / "session_x" / "log").open("w") as log:
                child = subprocess.Popen(command, stdout=log, start_new_session=True)
            child.send_signal(signal.SIGSTOP)
            stopped = Process.of(child.pid)
        os.utime(folder, (0, 0))
        return stopped

    return lay


def signals() -> list[Case]:
    """Return a case for every signal to every process of both executors."""
    cases = []
    for ray, targets in ((False, OF_LOCAL), (True, OF_RAY)):
        for target in targets:
            for how in SIGNALS:
                # a driver that is stopped waits for whoever stopped it
                if target == "driver" and how in ("SIGSTOP", "SIGTSTP"):
                    continue
                name = f"{'ray' if ray else 'local'}: {how} to {target}"
                same = target != CHANGES_REWARDS
                cases.append(Case(name, ray, signalled(target, how), comparable=same))
    return cases


def others() -> list[Case]:
    """Return the faults of what is around a run with Ray."""
    removals = ("session_*/sockets/*", "session_*", "session_*/logs", "*", "session_*/*.json")
    limits = ("ulimit -n 40", "ulimit -u 12", "ulimit -v 900000", "ulimit -f 1")
    tiny = 'mount -t tmpfs -o size={} tmpfs /dev/shm && exec "$@"'
    refuse_gpu = "the run needs 3 GPUs"
    return [
        *(Case(f"ray: {w} removed", True, removed(w)) for w in removals),
        *(Case(f"ray: {kind} left", True, around=leftover(kind))
          for kind in ("a folder", "a process", "a file")),
        *(Case(f"ray: {limit}", True, wrapper=("bash", "-c", f'{limit}; exec "$@"', "-"))
          for limit in limits),
        *(Case(f"ray: /dev/shm of {size}", True, wrapper=(
            "unshare", "-rm", "sh", "-c", tiny.format(size), "-")) for size in ("64k", "20m")),
        *(Case(f"ray: a second at once, {'in the same' if same else 'in another'} folder", True,
               accompanied(same), ("steps=20",), comparable=False, finishes=True)
          for same in (True, False)),
        *(Case(f"ray: {n} strangers knock at every port", True, besieged(n), ("steps=40",),
               comparable=False, finishes=True) for n in (0, 20, 200)),
        Case("ray: no GPU", True, more=("ray.devices=gpu",), refused=refuse_gpu),
        *(Case(f"ray: ray.address={address}", True, more=(f"ray.address={address}",),
               refused="cannot be joined")
          for address in ("127.0.0.1:1", "auto", "nowhere.invalid:1", "127.0.0.1", "'[::1]:1'")),
        *(Case(f"ray: {key}={value}", True, environment={key: value})
          for key, value in (("RAY_ADDRESS", "127.0.0.1:1"), ("RAY_ADDRESS", "ray://x:1"),
                             ("RAY_AUTH_TOKEN", "0" * 64), ("RAY_AUTH_MODE", "disabled"),
                             ("RAY_AUTH_TOKEN_PATH", "/nowhere"), ("RAY_TMPDIR", "/nowhere"),
                             ("TMPDIR", "/tmp/" + "long/" * 30))),
    ]  # fmt: skip


def check_one(
    case: Case, inputs: Path, folder: Path, want: list[object], chance: random.Random
) -> str:
    """Disturb a run as ``case`` says; return what is wrong with how it ends."""
    temporary = Path(tempfile.mkdtemp(prefix="cf-"))
    given = arguments(inputs, folder, *COMMON, *(RAY if case.ray else ()), *case.more)
    environment = {"TMPDIR": str(temporary), **case.environment}
    target = f"reward.target={inputs / 'reward.py'}:score"
    given = [*(word for word in given if not word.startswith("reward.target=")), target]
    try:
        stopped = case.around(temporary) if case.around else None
        # before the first step, which takes longest, or after any other
        moment, after = (
            chance.choice((0, 1, 2, 3)),
            chance.random() * (0.3, 6.0)[chance.random() < 0.2],
        )
        with Run(folder, given, environment, case.wrapper) as run:
            end = time.monotonic() + END_S
            while run.steps_done() < moment and run.popen.poll() is None and time.monotonic() < end:
                time.sleep(POLL_S)
            time.sleep(after)
            amiss = case.disturb(run, chance)
            code = run.wait(END_S)
            said = run.said.read_text(errors="replace")
            if code is None:
                return f"moment {moment}: it hangs: {last(said)}"
            if left := run.left():
                return f"moment {moment}: {len(left)} processes are left: {', '.join(left)[:200]}"
        if amiss:
            return f"moment {moment}: {amiss}"
        if stopped and not stopped.has_ended():
            return "what another run left is alive"
        if case.refused:
            good = code == 2 and case.refused in said and "Traceback" not in said
            return "" if good else f"not refused, code {code}: {last(said)}"
        if case.finishes and code != 0:
            return f"moment {moment}: it did not go on, code {code}: {last(said)}"
        if code not in (0, 2) and "driver" not in case.name:
            return f"moment {moment}: it ended with code {code}: {last(said)}"
        if "Traceback" in said and "driver" not in case.name:
            return f"moment {moment}: a traceback, code {code}: {last(said)}"
        if code and "driver" not in case.name and not re.search(r"^coupler: ", said, re.M):
            return f"moment {moment}: no sentence, code {code}: {last(said)}"
        return (
            again(case, given, environment, folder, want) if code else differs(case, folder, want)
        )
    finally:
        end_all_of(temporary, 0.0)
        shutil.rmtree(temporary, ignore_errors=True)


def again(
    case: Case, given: list[str], environment: dict[str, str], folder: Path, want: list[object]
) -> str:
    """Run the same command undisturbed, which must finish."""
    with Run(folder, given, environment) as run:
        code = run.wait(END_S)
        said = run.said.read_text(errors="replace")
        if code != 0:
            return f"the same command afterwards ended with code {code}: {last(said)}"
        if left := run.left():
            return f"afterwards {len(left)} processes are left: {', '.join(left)[:200]}"
    return differs(case, folder, want)


def differs(case: Case, folder: Path, want: list[object]) -> str:
    got = steps(folder)
    if case.comparable and got != want:
        return f"other numbers: {len(got)} lines of {len(want)}"
    return ""


def last(said: str) -> str:
    return " | ".join(said.strip().splitlines()[-4:])[-400:]


def check(seed: int, cases: int) -> Iterator[str]:
    """Try faults of ``executor=local`` and of Ray in turn, two of Ray for one."""
    chance = random.Random(seed)
    every = [*signals(), *others()]
    pools = [[case for case in every if case.ray is ray] for ray in (False, True)]
    pools = [chance.sample(pool, len(pool)) for pool in pools]

    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coupler-faults-")))
        inputs = root / "inputs"
        write_inputs(inputs)
        (inputs / "reward.py").write_text(REWARD)
        with Run(root / "honest", arguments(inputs, root / "honest", *COMMON)) as honest:
            assert honest.wait(END_S) == 0, honest.said.read_text()
        want: list[object] = list(steps(root / "honest"))

        for number in range(cases):
            pool = pools[number % 3 > 0]
            case = pool[(number // 3 * (2 if number % 3 else 1) + (number % 3 == 2)) % len(pool)]
            start = time.monotonic()
            wrong = check_one(case, inputs, root / f"run{number}", want, chance)
            seconds = time.monotonic() - start
            if os.environ.get("COUPLER_FAULT_TALK"):
                print(f"{number}: {case.name}: {wrong or 'ok'} ({seconds:.0f} s)", flush=True)
            if wrong:
                yield f"case {number}: {case.name}: {wrong}"


if __name__ == "__main__":
    run(check, 42)
