"""Watch one process, and end everything that it started.

The file is run as a script, ``python -I -S supervisor.py CONTROL BYTES TASKS
COMMAND``, and imports little, so that it starts at once. The command inherits stdin and
stdout. Its stderr passes through here, and what is too much of it is left out.

CONTROL is the descriptor of a socket. Its owner writes ``s`` for the stacks of the
process, and closes the socket to end it. The last thing that this side writes is how
the process ended, as JSON. BYTES and TASKS bound all that is below, where
they are not 0.

A process that makes a session of its own, or whose parent ends, stays below this one,
which adopts such orphans. When the owner's thread ends, all of them do.
"""

import ctypes
import errno
import json
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TICK_S = 0.25
# All that is below a process is gone after this time, or cannot be ended at all.
END_S = 5.0
# Output of the process: at most this much at once, and then this much a second.
BURST_BYTES, RATE_BYTES = 1 << 20, 1 << 16
CHUNK = 1 << 16
LINUX = sys.platform == "linux"
SIGCATCH = b"SigCgt:"


def watched(control: int, bytes: int = 0, tasks: int = 0) -> list[str]:
    """Return the words before a command that a supervisor watches.

    The command, and all that it started, ends when the other end of a socket is closed,
    when the thread that started it ends, or above the limits.

    Args:
        control: the descriptor of this end of the socket.
        bytes: the most memory of all processes together, or 0 for any.
        tasks: the most processes and threads, or 0 for any.
    """
    return [sys.executable, "-I", "-S", __file__, str(control), str(bytes), str(tasks)]


def processes() -> dict[int, list[str]]:
    """Return the fields of each process that runs, from its state on, by its number."""
    found = {}
    for name in os.listdir("/proc") if LINUX else ():
        fields = _fields(name) if name.isdigit() else None
        if fields:
            found[int(name)] = fields
    return found


def below(root: int, table: dict[int, list[str]]) -> list[int]:
    """Return the processes of ``table`` that descend from ``root``."""
    children: dict[int, list[int]] = {}
    for pid, fields in table.items():
        children.setdefault(int(fields[1]), []).append(pid)

    found, open_ = [], [root]
    while open_:
        new = children.get(open_.pop(), [])
        found += new
        open_ += new
    return found


def end_below(root: int) -> bool:
    """Kill all that is below ``root``, by process groups, until nothing is left.

    Returns False where something is left after ``END_S``.
    """
    deadline = time.monotonic() + END_S
    own = os.getpgid(root)

    while time.monotonic() < deadline:
        table = processes()
        groups = {int(table[pid][2]) for pid in below(root, table)} - {own}
        if not groups:
            return True
        # A whole group gets a signal at once, so that none of it can fork meanwhile.
        for group in groups:
            send_group(group)
        reap()
        time.sleep(0.002)
    return False


def end_marked(mark: bytes) -> None:
    """Kill each process whose environment holds ``mark``."""
    for pid in processes():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read(1 << 20):
                    os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def send_group(group: int) -> None:
    """Kill a process group, if there is one."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def reap() -> dict[int, int]:
    """Take the status of each child that ended."""
    found = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found[pid] = status


def _fields(name: str) -> list[str] | None:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].decode("ascii").split()
    except OSError:
        return None
    return fields if fields and fields[0] not in "ZX" else None


class Output:
    """Pass on what the process writes to stderr, within a budget."""

    def __init__(self, source: int) -> None:
        self.source, self.left_out = source, 0
        self.budget, self.since = float(BURST_BYTES), time.monotonic()
        os.set_blocking(source, False)
        # Who reads it may be slow, and this process must not wait.
        os.set_blocking(2, False)

    def forward(self) -> bool:
        """Pass on a chunk. Returns False where there is none."""
        try:
            data = os.read(self.source, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return False

        now = time.monotonic()
        self.budget = min(BURST_BYTES, self.budget + RATE_BYTES * (now - self.since))
        self.since = now
        if self.budget < len(data):
            self.left_out += len(data)
        else:
            self.budget -= len(data)
            self.say_what_is_left_out()
            self.write(data)
        return True

    def say_what_is_left_out(self) -> None:
        if self.left_out:
            self.write(
                f"\n[{self.left_out} bytes of this process's output are left out]\n".encode()
            )
        self.left_out = 0

    def write(self, data: bytes) -> None:
        try:
            written = os.write(2, data)
        except BlockingIOError:
            written = 0
        except OSError:
            return
        self.left_out += len(data) - written


class Supervisor:
    """Own the process until it or its owner ends."""

    def __init__(self, control: int, max_bytes: int, max_tasks: int, command: list[str]) -> None:
        self.control, self.max_bytes, self.max_tasks = control, max_bytes, max_tasks
        os.set_inheritable(control, False)

        self.woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self.woken, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

        self.ended = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if LINUX:
            libc = ctypes.CDLL(None)
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        source, sink = os.pipe()
        self.process = os.fork()
        if not self.process:
            become(command, sink)
        os.close(sink)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        self.output = Output(source)
        # Processes that are none of ours need not be looked at again.
        self.foreign: set[int] = set()

    def watch(self) -> dict[str, object]:
        """Wait for the end of the process, and say how it ended."""
        poller = select.poll()
        for descriptor in (self.control, self.woken, self.output.source):
            poller.register(descriptor, select.POLLIN)
        due = time.monotonic() + TICK_S

        while not self.ended:
            ready = {fd for fd, _ in poller.poll(1000 * max(0.0, due - time.monotonic()))}
            if self.output.source in ready and not self.output.forward():
                poller.unregister(self.output.source)
            if self.control in ready:
                self._obey()
            if self.woken in ready:
                _drain(self.woken)
            status = reap().get(self.process)
            if status is not None:
                return ending(status)
            if time.monotonic() >= due:
                if excess := self._excess():
                    return {"how": excess, "blame": False}
                due = time.monotonic() + TICK_S
        return {"how": "was ended", "blame": False}

    def close(self, how: dict[str, object]) -> None:
        """End what is left, pass on its last words, and say ``how`` it ended."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not LINUX:
            send_group(self.process)
        end_below(os.getpid())

        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and self.output.forward():
            continue
        self.output.say_what_is_left_out()
        try:
            os.write(self.control, json.dumps(how).encode() + b"\n")
        except OSError:
            return

    def _end(self, *_: object) -> None:
        self.ended = True

    def _obey(self) -> None:
        try:
            said = os.read(self.control, 16)
        except OSError as error:
            said = b"" if error.errno != errno.EAGAIN else b" "
        if not said:
            self.ended = True
        if b"s" in said:
            for pid in below(os.getpid(), processes()):
                dump_stacks(pid)

    def _excess(self) -> str:
        """Say which limit all that is below this process exceeds, if any."""
        tasks = pages = 0
        ours = self._ours()
        for fields in ours.values():
            tasks += int(fields[17])
            pages += int(fields[21])
        used = pages * os.sysconf("SC_PAGE_SIZE")

        if ours.get(self.process, " ")[0] == "T":
            return "was stopped"
        if 0 < self.max_bytes < used:
            return f"used {used / 2**30:.1f} GiB of memory, above its limit"
        if 0 < self.max_tasks < tasks:
            return f"had {tasks} processes and threads, above its limit"
        return ""

    def _ours(self) -> dict[int, list[str]]:
        names = {int(name) for name in os.listdir("/proc") if name.isdigit()} if LINUX else set()
        self.foreign &= names
        table = {pid: f for pid in names - self.foreign if (f := _fields(str(pid)))}
        ours = below(os.getpid(), table)
        # The parent of a process may have ended while its fields were read.
        known = self.foreign | table.keys()
        self.foreign |= {p for p, f in table.items() if int(f[1]) in known} - set(ours)
        return {pid: table[pid] for pid in ours}


def become(command: list[str], stderr: int) -> None:
    """Turn this child into the process that is watched."""
    import resource  # Windows has none

    try:
        os.setsid()
        parent = os.getppid()
        if LINUX:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # Where memory runs out, this process goes first.
            _write("/proc/self/oom_score_adj", b"1000")

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.dup2(stderr, 2)
        if os.getppid() == parent:
            os.execv(command[0], command)  # noqa: S606
    finally:
        os._exit(127)


def dump_stacks(pid: int) -> None:
    """Make faulthandler of a process write where it hangs, if it has one."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            caught = next(line for line in file if line.startswith(SIGCATCH))
        if int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
            os.kill(pid, signal.SIGUSR1)
    except (OSError, StopIteration):
        return


def ending(status: int) -> dict[str, object]:
    """Say how a process ended whose status is ``status``."""
    code = os.waitstatus_to_exitcode(status)
    # bubblewrap says in this way that what it ran was killed.
    number = -code if code < 0 else code - 128

    if number not in {signal.Signals(s).value for s in signal.valid_signals() if s < 32}:
        return {"how": f"exited with code {code}", "blame": False}
    name = signal.Signals(number).name
    if number == signal.SIGPROF:
        return {"how": "took more than its time of the processor", "blame": True}
    return {"how": f"was killed by {name}", "blame": False}


def _write(path: str, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError:
        return


def _drain(descriptor: int) -> None:
    try:
        os.read(descriptor, 4096)
    except BlockingIOError:
        return


if __name__ == "__main__":
    supervisor = Supervisor(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    supervisor.close(supervisor.watch())
