"""Confine this process by a filter of system calls, where bubblewrap is missing.

The filter is a list of what may be called, with conditions on arguments. Everything
else fails with EPERM: new processes, sockets, files to write, changes of files, signals
to others, tracing, namespaces, keyrings, io_uring, bpf, memory with a file of its own,
and memory that is made executable. libseccomp writes it, through ``pyseccomp``.

A filter sees numbers and no paths, so files can still be read.
"""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

MACHINES = ("x86_64", "aarch64")
FIX = "pip install 'coupler-core[reasoning-gym]'"
TRIAL = "from coupler.rewards.seccomp import trial; trial()"
# The trial imports Python's and this package's files, on a disk that may be slow.
PROBE_S = 20.0

CALLS = (
    # What is open already.
    *("read", "pread64", "readv", "preadv", "write", "pwrite64", "writev", "lseek", "close"),
    *("close_range", "dup", "dup2", "dup3", "pipe", "pipe2", "fadvise64", "readahead"),
    *("poll", "ppoll", "select", "pselect6", "eventfd2"),
    *("epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait"),
    # What is there, and who this is.
    *("stat", "fstat", "lstat", "newfstatat", "statx", "statfs", "fstatfs", "access"),
    *("faccessat", "faccessat2", "readlink", "readlinkat", "getdents64", "getcwd", "chdir"),
    *("fchdir", "getpid", "gettid", "getppid", "getuid", "geteuid", "getgid", "getegid"),
    *("getresuid", "getresgid", "getgroups", "getpgid", "getpgrp", "getsid", "getpriority"),
    *("uname", "sysinfo", "getrusage", "times", "getcpu", "sched_getaffinity", "getrandom"),
    *("getrlimit", "setrlimit", "capget", "umask"),
    # Memory. What makes it executable has a condition.
    *("brk", "munmap", "mremap", "madvise", "mincore", "msync", "membarrier"),
    # Threads, clocks and signals.
    *("futex", "futex_waitv", "set_robust_list", "get_robust_list", "set_tid_address", "rseq"),
    *("sched_yield", "exit", "exit_group", "restart_syscall", "arch_prctl"),
    *("clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "time"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigpending", "rt_sigtimedwait"),
    *("rt_sigsuspend", "sigaltstack", "pause", "alarm", "getitimer", "setitimer"),
)

# Flags of open() that write: WRONLY, RDWR, CREAT, TRUNC, APPEND and TMPFILE.
OPEN_WRITES = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | 0o20000000
PROT_EXEC = 0x4
CLONE_THREAD = 0x10000
# New namespaces, of time to of network.
CLONE_NEW = 0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000
CLONE_NEW |= 0x20000000 | 0x40000000
# Whether it is a terminal and how wide, how much can be read, and the flags of a
# descriptor.
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# To copy a descriptor, and its flags. A lock or an owner would reach others.
FCNTL = (0, 1, 2, 3, 4, 1030)
# The name of a thread, and of memory.
PRCTL = (15, 16, 0x53564D41)
# Callers try another way where these do not exist.
ABSENT = ("clone3", "openat2", "memfd_create")


@lru_cache(1)
def why_none() -> str:
    """Try the filter once, in a process of its own.

    Returns why it cannot be had, or nothing.
    """
    if sys.platform != "linux":
        return "seccomp needs Linux"
    if platform.machine() not in MACHINES:
        return f"the list of system calls is for {' and '.join(MACHINES)}"

    path = os.pathsep.join(os.path.abspath(p) for p in sys.path if p)
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_S,
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"a process with seccomp did not start within {PROBE_S:g} s"
    except OSError as error:
        return f"a process with seccomp cannot be started: {error}"
    if done.stdout.strip() == b"42":
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"]
    return said[-1][:200]


def trial() -> None:
    """Confine this process, and print 42 where the filter then holds."""
    try:
        confine()
    except OSError as error:
        sys.exit(str(error))

    try:
        os.close(os.open(os.devnull, os.O_WRONLY))
    except PermissionError:
        print(6 * 7)
    else:
        sys.exit("the kernel loads a seccomp filter, and does not obey it")


@lru_cache(1)
def version() -> str:
    """Return the name and version of the library."""
    from importlib.metadata import version

    return f"seccomp (pyseccomp {version('pyseccomp')})"


def confine() -> None:
    """Apply the filter to every thread of this process, for good.

    Raises:
        OSError: it cannot be applied. The text says why.
    """
    import resource  # Windows has none

    seccomp = _library()
    # A file that was opened for writing before does not grow either.
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))

    try:
        made(seccomp).load()
    except OSError as error:
        raise OSError(error.errno, f"the kernel refuses a seccomp filter: {error}") from None


def made(seccomp: Any, arch: int | None = None) -> Any:
    """Return the filter, for this machine or for ``arch``."""
    allow, attr = seccomp.ALLOW, seccomp.Attr
    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    if arch is not None and arch != seccomp.system_arch():
        rules.add_arch(arch)
        rules.remove_arch(seccomp.Arch.NATIVE)

    rules.set_attr(attr.ACT_BADARCH, seccomp.KILL_PROCESS)
    rules.set_attr(attr.CTL_NNP, 1)
    rules.set_attr(attr.CTL_TSYNC, 1)
    known = seccomp.system_arch() if arch is None else arch
    for name in CALLS:
        # Other machines, and older libraries, lack some.
        if seccomp.resolve_syscall(known, name) >= 0:
            rules.add_rule(allow, name)
    for name in ABSENT:
        if seccomp.resolve_syscall(known, name) >= 0:
            rules.add_rule(seccomp.ERRNO(errno.ENOSYS), name)
    for name, *arguments in conditions(seccomp.Arg, seccomp.EQ, seccomp.MASKED_EQ):
        if seccomp.resolve_syscall(known, name) >= 0:
            rules.add_rule(allow, name, *arguments)
    return rules


def conditions(argument: Any, equals: int, masked: int) -> Iterator[tuple[Any, ...]]:
    """Yield each call that is allowed with some arguments alone, and these."""
    own = os.getpid()

    yield "open", argument(1, masked, OPEN_WRITES, 0)
    yield "openat", argument(2, masked, OPEN_WRITES, 0)
    yield "clone", argument(0, masked, CLONE_THREAD | CLONE_NEW, CLONE_THREAD)
    for name in ("mmap", "mprotect"):
        yield name, argument(2, masked, PROT_EXEC, 0)
    for name in ("kill", "tgkill"):
        yield name, argument(0, equals, own)
    for pid in (0, own):
        yield "prlimit64", argument(0, equals, pid)
    for name, values in (("ioctl", IOCTL), ("fcntl", FCNTL)):
        for value in values:
            yield name, argument(1, equals, value)
    for value in PRCTL:
        yield "prctl", argument(0, equals, value)


def _library() -> Any:
    """Return the module ``pyseccomp``.

    Raises:
        OSError: it is missing, or its system library is.
    """
    try:
        import pyseccomp
    except ImportError:
        raise OSError("pyseccomp is not installed") from None
    # It says so where the library is missing, and not where this lacks a function.
    except RuntimeError:
        raise OSError("libseccomp.so.2 is not installed (apt-get install libseccomp2)") from None
    except (AttributeError, OSError) as error:
        raise OSError(f"libseccomp.so.2 cannot be used: {error}") from None

    return pyseccomp
