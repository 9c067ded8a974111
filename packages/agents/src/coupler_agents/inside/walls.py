"""Part a process from the others of the sandbox, and take away what it does not need.

``user_namespaces(7)``, ``capset(2)`` and ``prctl(2)`` say what each call does.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

from coupler_agents.inside import syscalls
from coupler_agents.inside.bounds import Bounds

# Flags of unshare(2), mount(2) and prctl(2).
NEWNS = 0x20000
NEWIPC = 0x8000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
NOSUID = 0x2
NODEV = 0x4
READ_ONLY = 0x1
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
SIGKILL = 9
# The version of the structure of capset(2).
CAPABILITIES = 0x20080522
# Who a program is, in its own eyes.
USER = 1000
TMP = b"/tmp"
PROC = b"/proc"
SHARED = b"/dev/shm"
# Files of each folder, and open files of a process.
INODES = 16_384
DESCRIPTORS = 256
# Address space, as a multiple of memory.
RESERVED = 4

libc = ctypes.CDLL(None, use_errno=True)


def become(user: int) -> None:
    """Give up the rights of root.

    The kernel exempts root from its limit of processes, and everybody else not.
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # Only then may a process write the map of users of a namespace that it makes.
    _check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")


def separate(bounds: Bounds) -> None:
    """Give this process files of its own, and its children a world of their own.

    Raises:
        OSError: the kernel refuses it.
    """
    user, group = os.getuid(), os.getgid()
    _check(libc.unshare(NEWUSER | NEWNS | NEWIPC | NEWPID | NEWNET), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{USER} {user} 1"),
        ("gid_map", f"{USER} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)

    # A file without content takes memory of the kernel, too.
    sized = f"size={bounds.tmp},nr_inodes={INODES},mode=0700"
    _mount(TMP, sized, 0)
    _mount(SHARED, sized, 0)
    # The kernel allows no new /proc inside another one of which parts are hidden.
    _mount(PROC, "size=4k", READ_ONLY)


def confine(bounds: Bounds, mapped: int, others: int) -> None:
    """Take every capability from this process, and bound what it may use.

    Args:
        mapped: bytes of address space that it had before it ran anything.
        others: processes of the sandbox's own that its limit of processes counts.

    Raises:
        OSError: the kernel refuses it.
    """
    header = struct.pack("=Ii", CAPABILITIES, 0)
    _check(libc.capset(header, struct.pack("=6I", *([0] * 6))), "capset")

    for limit, value in (
        (resource.RLIMIT_DATA, bounds.memory + mapped),
        # Libraries reserve more than they use, and shared memory counts here alone.
        (resource.RLIMIT_AS, RESERVED * bounds.memory + mapped),
        (resource.RLIMIT_NPROC, bounds.processes + others),
        (resource.RLIMIT_FSIZE, bounds.tmp),
        (resource.RLIMIT_NOFILE, DESCRIPTORS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    syscalls.apply()


def end_with_parent() -> None:
    """Have this process killed when its parent ends."""
    _check(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl")


def hide() -> None:
    """Keep processes of the same user from tracing this one."""
    _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def _mount(where: bytes, options: str, flags: int) -> None:
    what = b"tmpfs"
    done = libc.mount(what, where, what, NOSUID | NODEV | flags, options.encode())
    _check(done, f"mount {where.decode()}")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
