"""Filter the system calls of a program by a list of what it may not call.

The sandbox has no network and no files of the user already. The filter takes away what
reaches beyond it in other ways (sockets to the host of a virtual machine), what holds
memory that no limit counts, and the parts of the kernel that ordinary programs do not
need. ``seccomp(2)`` and the kernel's ``syscall.tbl`` are the sources.
"""

from __future__ import annotations

import ctypes
import platform
import struct

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
MODE_FILTER = 2
EPERM = 1
ENOSYS = 38
EAFNOSUPPORT = 97
# Columns of the table, and the machines' numbers in audit.h.
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# Each call with its numbers on x86-64 and aarch64.
DENIED = (
    # other processes
    "ptrace 101 117",
    "process_vm_readv 310 270",
    "process_vm_writev 311 271",
    "kcmp 312 272",
    "pidfd_getfd 438 438",
    # memory that no limit of a process counts
    "memfd_create 319 279",
    "memfd_secret 447 447",
    "shmget 29 194",
    "semget 64 190",
    "msgget 68 186",
    # namespaces and mounts
    "unshare 272 97",
    "setns 308 268",
    "mount 165 40",
    "umount2 166 39",
    "pivot_root 155 41",
    "chroot 161 51",
    "open_tree 428 428",
    "move_mount 429 429",
    "fsopen 430 430",
    "fsconfig 431 431",
    "fsmount 432 432",
    "fspick 433 433",
    "mount_setattr 442 442",
    # parts of the kernel that ordinary programs do not need
    "bpf 321 280",
    "perf_event_open 298 241",
    "io_uring_setup 425 425",
    "io_uring_enter 426 426",
    "io_uring_register 427 427",
    "userfaultfd 323 282",
    "add_key 248 217",
    "request_key 249 218",
    "keyctl 250 219",
    "name_to_handle_at 303 264",
    "open_by_handle_at 304 265",
    "init_module 175 105",
    "finit_module 313 273",
    "delete_module 176 106",
    "kexec_load 246 104",
    "kexec_file_load 320 294",
    "quotactl 179 60",
    "swapon 167 224",
    "swapoff 168 225",
    "acct 163 89",
    "syslog 103 116",
    "reboot 169 142",
)
CLONE = (56, 220)
CLONE3 = (435, 435)
SOCKET = (41, 198)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET
NEW_NAMESPACES = 0x7E020000
# AF_UNIX, AF_INET and AF_INET6
FAMILIES = (1, 2, 10)

# Instructions of classic BPF, and offsets in ``struct seccomp_data``.
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
NUMBER = 0
ARCHITECTURE = 4
FIRST_ARGUMENT = 16
ALLOW = 0x7FFF0000
ERRNO = 0x00050000
KILL = 0x80000000


def why_none() -> str:
    """Return why there is no filter for this machine, or nothing."""
    if platform.machine() in MACHINES:
        return ""
    return f"the filter of system calls is for {' and '.join(MACHINES)}"


def program(machine: str) -> bytes:
    """Return the filter for a machine, as the kernel reads it.

    Every test stands before its own verdict, so that jumps pass over one instruction.
    """
    column, architecture = MACHINES[machine]
    code = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        # Calls with the numbers of the x32 interface.
        code += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]

    for numbers in denied().values():
        code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, ERRNO | EPERM)]
    # The C library then calls clone, whose flags a filter can see.
    code += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ERRNO | ENOSYS)]
    code += [
        (EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, ERRNO | EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    code += [
        (EQUAL, 0, 5, SOCKET[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((EQUAL, len(FAMILIES) - n, 0, family) for n, family in enumerate(FAMILIES)),
        (RETURN, 0, 0, ERRNO | EAFNOSUPPORT),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def denied() -> dict[str, tuple[int, int]]:
    """Return the numbers of each call that is denied, by its name."""
    rows = (line.split() for line in DENIED)
    return {name: (int(first), int(second)) for name, first, second in rows}


def apply() -> None:
    """Apply the filter to this process and all that it starts, for good.

    Raises:
        OSError: the kernel refuses it.
    """
    code = program(platform.machine())
    kept = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, and where they are.
    head = struct.pack("@HP", len(code) // 8, ctypes.addressof(kept))
    given = ctypes.create_string_buffer(head)
    libc = ctypes.CDLL(None, use_errno=True)

    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(given), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses a filter of system calls")
