"""What a reward can and cannot do behind the filter of system calls."""

from __future__ import annotations

import errno
import os
import platform
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from coupler.errors import ConfigError, CouplerError
from coupler.rewards import Invalid, Limits, check_reward, sandbox, seccomp

# Hostile code of these tests runs as the reward itself.
REWARD = """
import ctypes, ctypes.util, errno, mmap, os, queue, socket, subprocess, sys, threading
import numpy as np
import sympy

libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    words += [ctypes.c_long(0)] * (6 - len(words))
    if libc.syscall(ctypes.c_long(number), *words) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return 0.0

def early(asked, told):
    while code := asked.get():
        try:
            told.put(eval(code))
        except OSError as error:
            told.put(error)

class Run:
    sandbox = True
    def __init__(self):
        self.log = open("THERE/log", "w")
        self.asked, self.told = queue.Queue(), queue.Queue()
        threading.Thread(target=early, args=(self.asked, self.told), daemon=True).start()
    def __call__(self, completion):
        space = {"self": self, "there": "THERE/there", "mine": "THERE/mine", **globals()}
        exec(completion, space)
        return float(space.get("result", 0.0))

def read(completion):
    return float(completion in os.environ)
"""

needs_seccomp = pytest.mark.skipif(bool(seccomp.why_none()), reason=seccomp.why_none())

FORBIDDEN = (
    *("socket", "socketpair", "connect", "bind", "listen", "accept", "accept4", "sendto"),
    *("sendmsg", "recvmsg", "fork", "vfork", "execve", "execveat", "ptrace", "kcmp"),
    *("process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_open"),
    *("pidfd_send_signal", "pidfd_getfd", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"),
    *("keyctl", "add_key", "request_key", "unshare", "setns", "mount", "umount2", "pivot_root"),
    *("chroot", "bpf", "io_uring_setup", "io_uring_enter", "io_setup", "userfaultfd"),
    *("perf_event_open", "shmget", "shmat", "msgget", "semget", "mq_open", "inotify_init1"),
    *("fanotify_init", "unlink", "unlinkat", "rename", "renameat", "renameat2", "link", "linkat"),
    *("symlink", "symlinkat", "mkdir", "mkdirat", "mknod", "mknodat", "rmdir", "chmod", "fchmod"),
    *("fchmodat", "chown", "fchown", "lchown", "fchownat", "truncate", "ftruncate", "fallocate"),
    *("utime", "utimes", "utimensat", "setxattr", "fsetxattr", "removexattr", "creat"),
    *("name_to_handle_at", "open_by_handle_at", "setuid", "setgid", "setgroups", "setresuid"),
    *("setsid", "setpgid", "capset", "personality", "seccomp", "reboot", "kexec_load"),
    *("init_module", "finit_module", "delete_module", "swapon", "sethostname", "settimeofday"),
    *("clock_settime", "adjtimex", "ioperm", "iopl", "pkey_mprotect", "remap_file_pages"),
    *("splice", "tee", "vmsplice", "sendfile", "copy_file_range", "flock", "acct", "quotactl"),
    *("syslog", "vhangup", "setpriority", "sched_setscheduler", "sched_setaffinity"),
    *("ioprio_set", "migrate_pages", "move_pages", "mbind", "set_mempolicy", "modify_ldt"),
    *("timer_create", "memfd_create", "memfd_secret", "openat2", "clone3", "fsopen", "fsmount"),
    *("move_mount", "open_tree", "landlock_create_ruleset"),
)

# Python code, and system calls by ``call`` with the name in braces.
HOSTILE = {
    "a socket": "socket.socket()",
    "a pair of sockets": "socket.socketpair()",
    "a command": "subprocess.run(['true'])",
    "a shell": "result = os.system('true') == 0 or 1 / 0",
    "a fork": "os.fork() or os._exit(0)",
    "a spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "to write": "open(there, 'w')",
    "to append": "open(mine, 'a')",
    "to update": "open(mine, 'r+')",
    "to create": "os.open(there, os.O_CREAT)",
    "to cut off": "os.open(mine, os.O_TRUNC)",
    "a nameless file": "os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
    "to open with high bits": "call({openat}, -100, mine.encode(), (1 << 40) | 1)",
    "to write through memory": "open('/proc/self/mem', 'r+b')",
    "to unlink": "os.unlink(mine)",
    "to rename": "os.rename(mine, there)",
    "to link": "os.link(mine, there)",
    "a folder": "os.mkdir(there)",
    "to change a mode": "os.chmod(mine, 0)",
    "to change times": "os.utime(mine)",
    "to end the parent": "os.kill(os.getppid(), 9)",
    "to end the trainer": "os.kill(TRAINER, 9)",
    "to end all": "os.kill(-1, 0)",
    "to end its group": "os.kill(0, 0)",
    "to end a thread of the trainer": "call({tgkill}, TRAINER, TRAINER, 0)",
    "to trace": "result = libc.ptrace(16, TRAINER, 0, 0) == 0 or call({ptrace}, 16, TRAINER)",
    "to become a command": "call({execve}, b'/bin/true')",
    "to clone a process": "call({clone}, 17)",
    "to clone a namespace": "call({clone}, 0x10000000 | 17)",
    "to clone a thread of namespaces": "call({clone}, 0x10000000 | 0x10000)",
    "memory to execute": "call({mmap}, 0, 4096, 7, 0x22, -1)",
    "to make memory executable": (
        "m = mmap.mmap(-1, 4096)\n"
        "call({mprotect}, ctypes.addressof(ctypes.c_char.from_buffer(m)), 4096, 5)"
    ),
    "limits of another": "call({prlimit64}, TRAINER, 7)",
    "to type into a terminal": "call({ioctl}, 2, 0x5412, b'x')",
    "signals by a descriptor": "call({fcntl}, 2, 8, TRAINER)",
    "a lock": "call({fcntl}, self.log.fileno(), 6, b' ' * 64)",
    "a tracer": "call({prctl}, 0x59616D61, -1)",
    "another filter": "call({prctl}, 22, 2)",
    "a socket in a thread from before": (
        "self.asked.put('socket.socket()')\nraise self.told.get()"
    ),
    "a library": "ctypes.CDLL('libanl.so.1')",
} | {f"the call {name}": f"call({{{name}}})" for name in FORBIDDEN}

# The last is a command's code that is not 0.
REFUSED = (
    *("Operation not permitted", "Function not implemented", "failed to map segment"),
    "ZeroDivisionError",
)

HARMLESS = {
    "files are read": "result = open(mine).read() == 'mine'",
    "threads": (
        "found = []\nthreads = [threading.Thread(target=found.append, args=(1,))"
        " for _ in range(8)]\nfor t in threads: t.start()\nfor t in threads: t.join()\n"
        "result = sum(found) / 8"
    ),
    "sympy": "result = str(sympy.integrate(sympy.Symbol('x') ** 2)) == 'x**3/3'",
    "numpy": "result = np.allclose(np.linalg.inv(np.eye(300) * 2) * 2, np.eye(300))",
    "modules in Python": "import cmd, sched, this as z; result = bool(cmd.Cmd)",
    "memory": "result = len(bytearray(64 << 20)) / (64 << 20)",
    "a signal to itself": (
        "import signal\nsignal.signal(10, lambda *_: None)\nos.kill(os.getpid(), 10)\nresult = 1"
    ),
    "its own limits": "import resource; result = resource.getrlimit(7)[0] > 0",
    "output": "print('hello'); result = 1",
    "no secret": "result = 'A_SECRET' not in os.environ",
}


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("A_SECRET", "x")
    monkeypatch.setattr(sandbox, "why_no_bubblewrap", lambda: "bwrap is not installed")
    (tmp_path / "mine").write_text("mine")
    path = tmp_path / "run.py"
    path.write_text(REWARD.replace("THERE", str(tmp_path)))
    return f"{path}:Run"


def answers(reward: str, codes: list[str]) -> list[object]:
    limits = Limits(sandbox="auto")
    return [s.result for s in check_reward(reward, [(c, "", {}) for c in codes], 60.0, limits)]


def numbered(code: str) -> str:
    """Put the number of each system call of this machine for its name in braces."""
    import pyseccomp

    for name in re.findall(r"\{(\w+)\}", code):
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        code = code.replace(f"{{{name}}}", str(number))
    return code.replace("TRAINER", str(os.getpid()))


@needs_seccomp
def test_what_reaches_beyond_the_process_is_refused(reward: str, tmp_path: Path) -> None:
    codes = {why: numbered(code) for why, code in HOSTILE.items()}
    # A number below 0 is a call that this machine does not have.
    codes = {why: code for why, code in codes.items() if "call(-" not in code}
    assert len(codes) > len(HOSTILE) - 25

    found = dict(zip(codes, answers(reward, list(codes.values())), strict=True))
    through = {
        why: result
        for why, result in found.items()
        if not isinstance(result, Invalid) or not any(word in result.reason for word in REFUSED)
    }
    assert through == {}
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "there").exists()


@needs_seccomp
def test_what_stays_in_the_process_goes_on(reward: str) -> None:
    found = dict(zip(HARMLESS, answers(reward, list(HARMLESS.values())), strict=True))
    assert found == dict.fromkeys(HARMLESS, 1.0)


@needs_seccomp
def test_a_file_that_was_open_before_does_not_grow(reward: str, tmp_path: Path) -> None:
    (result,) = answers(reward, ["self.log.write('x' * 100_000); self.log.flush()"])
    assert isinstance(result, Invalid)
    assert "File too large" in result.reason
    assert (tmp_path / "log").read_text() == ""


@needs_seccomp
@pytest.mark.skipif(platform.machine() != "x86_64", reason="has no other numbers of calls")
def test_calls_by_the_numbers_of_another_machine_end_the_process(reward: str) -> None:
    (result,) = answers(reward, ["call(0x40000000 + 41, 2, 1)"])
    assert isinstance(result, Invalid)
    assert "was killed by SIGSYS" in result.reason


def decided(program: bytes, arch: int, number: int, arguments: Sequence[int]) -> int:
    """Run a filter as the kernel does, and return its action."""
    words = [a & 0xFFFFFFFFFFFFFFFF for a in (*arguments, *[0] * 6)][:6]
    data = struct.pack("<iIQ6Q", number, arch, 0, *words)
    steps = list(struct.iter_unpack("<HBBI", program))
    position = value = 0

    while True:
        code, yes, no, k = steps[position]
        position += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, k)
            case 0x54:
                value &= k
            case 0x05:
                position += k
            case 0x15:
                position += yes if value == k else no
            case 0x25:
                position += yes if value > k else no
            case 0x35:
                position += yes if value >= k else no
            case 0x06:
                return k
            case _:
                raise NotImplementedError(hex(code))


@needs_seccomp
@pytest.mark.parametrize("machine", ["X86_64", "AARCH64"])
def test_the_filter_of_each_machine(machine: str, tmp_path: Path) -> None:
    import pyseccomp

    arch = getattr(pyseccomp.Arch, machine)
    with open(tmp_path / "filter", "w+b") as file:
        seccomp.made(pyseccomp, arch).export_bpf(file)
        file.seek(0)
        program = file.read()

    def action(name: str, *arguments: int) -> int:
        number = pyseccomp.resolve_syscall(arch, name)
        return decided(program, arch, number, arguments)

    own = os.getpid()
    absent = [n for n in FORBIDDEN if pyseccomp.resolve_syscall(arch, n) < 0]
    assert len(absent) < 25
    through = [n for n in FORBIDDEN if n not in absent and action(n) == pyseccomp.ALLOW]
    assert through == []

    for name, arguments, allowed in (
        ("read", (0, 0, 0), True),
        ("exit_group", (0,), True),
        ("openat", (-100, 0, 0o2000000), True),
        *(("openat", (-100, 0, flag), False) for flag in (1, 2, 0o100, 0o1000, 0o2000)),
        ("openat", (-100, 0, (1 << 40) | 1), False),
        ("clone", (0x3D0F00,), True),
        *(("clone", (0x3D0F00 | 1 << bit,), False) for bit in (7, 17, 25, 26, 27, 28, 29, 30)),
        *(("clone", (flags,), False) for flags in (17, 0, 0x4111)),
        *((name, (0, 4096, 3), True) for name in ("mmap", "mprotect")),
        *((name, (0, 4096, prot), False) for name in ("mmap", "mprotect") for prot in (4, 5, 7)),
        *((name, (own, own, 9), True) for name in ("kill", "tgkill")),
        *((n, (pid, pid), False) for n in ("kill", "tgkill") for pid in (0, 1, -1, own + 1, -own)),
        *(("prlimit64", (pid,), pid in (0, own)) for pid in (0, own, 1, own + 1)),
        *(("prctl", (option,), option in (15, 16)) for option in range(70)),
        *(("ioctl", (2, request), request == 0x5401) for request in (0x5401, 0x5412, 0x541C)),
        *(("fcntl", (2, what), what < 5) for what in range(20)),
    ):
        assert (action(name, *arguments) == pyseccomp.ALLOW) is allowed, (name, arguments)

    for name in seccomp.ABSENT:
        assert action(name) == pyseccomp.ERRNO(errno.ENOSYS)
    other = {"X86_64": "AARCH64", "AARCH64": "X86_64"}[machine]
    assert decided(program, getattr(pyseccomp.Arch, other), 0, (0,)) == pyseccomp.KILL_PROCESS


@needs_seccomp
def test_every_reward_is_confined_where_a_sandbox_is_required(reward: str) -> None:
    plain = reward.replace(":Run", ":read")
    for mode, secret in (("require", 0.0), ("auto", 1.0), ("off", 1.0)):
        (scored,) = check_reward(plain, [("A_SECRET", "", {})], 60.0, Limits(sandbox=mode))
        assert scored.result == secret


def test_a_reward_that_asks_does_not_start_without_a_sandbox(
    reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp, "why_none", lambda: "pyseccomp is not installed")
    for mode, opening in (("auto", "reward.target=.*run.py:Run"), ("require", "reward.sandbox")):
        with pytest.raises(ConfigError, match=opening) as error:
            check_reward(reward, [("", "", {})], 60.0, Limits(sandbox=mode))
        for words in (
            "bwrap is not installed",
            "pyseccomp is not installed",
            "apt-get install bubblewrap",
            "pip install 'coupler-core[reasoning-gym]'",
            "reward.sandbox=off",
        ):
            assert words in str(error.value)
    (scored,) = check_reward(reward, [("result = 1", "", {})], 60.0, Limits(sandbox="off"))
    assert scored.result == 1.0


@pytest.mark.parametrize(
    ("platform_name", "machine", "why"),
    [
        ("darwin", "arm64", "seccomp needs Linux"),
        ("linux", "riscv64", "the list of system calls is for x86_64 and aarch64"),
    ],
)
def test_other_machines_have_no_seccomp(
    platform_name: str, machine: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp.sys, "platform", platform_name)
    monkeypatch.setattr(seccomp.platform, "machine", lambda: machine)
    assert seccomp.why_none.__wrapped__() == why


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError", "pyseccomp is not installed"),
        ("raise RuntimeError('Unable to find libseccomp')", "libseccomp.so.2 is not installed"),
        ("raise AttributeError('seccomp_init')", "libseccomp.so.2 cannot be used"),
    ],
)
def test_a_missing_library_is_named(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyseccomp.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert why in seccomp.why_none.__wrapped__()


@needs_seccomp
def test_a_filter_that_cannot_be_loaded_ends_the_start(
    reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp, "why_none", lambda: "")
    (tmp_path / "pyseccomp.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CouplerError, match=r"the sandbox of the reward .*pyseccomp is not"):
        check_reward(reward, [("", "", {})], 60.0)
