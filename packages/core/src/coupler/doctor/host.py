"""Check this machine and its interpreter.

These are Python, shared memory, loopback, the name of the host, and the disk.
"""

from __future__ import annotations

import shutil
import site
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import metadata
from pathlib import Path
from threading import Thread

from packaging.specifiers import SpecifierSet

from coupler.plugins.finding import Finding, ok, problem, warning
from coupler.plugins.manager import CORE
from coupler.rewards import sandbox, seccomp

GIB = 1 << 30
# NCCL and Ray fail below the first, and are slow below the second.
SHM_MIN_BYTES, SHM_BYTES = GIB // 4, GIB
DISK_MIN_BYTES = GIB
# A run may hold this many ports at a time, for rendezvous, collectives and Ray.
NUM_PORTS = 32
ANSWER_S = 5.0


def interpreter() -> Iterator[Finding]:
    """Check the version of Python, and that no packages from outside leak into it."""
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = metadata(CORE)["Requires-Python"]
    if wanted and version not in SpecifierSet(wanted):
        yield problem(
            "python", f"{version} is not {wanted}", f"python{wanted.strip('>=')} -m venv .venv"
        )
    elif sys.prefix == sys.base_prefix and not (Path(sys.prefix) / "conda-meta").is_dir():
        yield warning(
            "python",
            f"{version} at {sys.executable} is not a virtual environment: others change it too",
        )
    else:
        yield ok("python", f"{version} at {sys.executable}")

    user = Path(site.getusersitepackages())
    leaked = sorted({path.name.partition("-")[0] for path in user.glob("*.dist-info")})
    if str(user) in sys.path and leaked:
        more = " and more" if len(leaked) > 5 else ""
        yield problem(
            "user site",
            f"{user} is on the path, with {', '.join(leaked[:5])}{more}",
            "export PYTHONNOUSERSITE=1",
        )


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108 - the place, not a file in it
    """Check the room in shared memory, where processes of one host exchange tensors."""
    if not folder.is_dir():
        yield ok("shared memory", f"there is no {folder} here")
        return

    size = shutil.disk_usage(folder)
    text = f"{folder} has {_gib(size.total)}, {_gib(size.free)} free"

    if size.free < SHM_MIN_BYTES:
        fix = f"mount -o remount,size=8g {folder}, or in a container:  docker run --shm-size=8g"
        yield problem("shared memory", f"{text}: too little for NCCL and Ray", fix)
    elif size.free < SHM_BYTES:
        yield warning(
            "shared memory", f"{text}: NCCL and Ray work better with {_gib(SHM_BYTES)} and more"
        )
    else:
        yield ok("shared memory", text)


def ports() -> Iterator[Finding]:
    """Check that a run can open the ports that it needs on loopback, and be reached."""
    try:
        with ExitStack() as stack:
            bound = [stack.enter_context(socket.socket()) for _ in range(NUM_PORTS)]
            for port in bound:
                port.bind(("127.0.0.1", 0))
            bound[0].listen()
            socket.create_connection(bound[0].getsockname(), timeout=ANSWER_S).close()
    except OSError as error:
        yield problem(
            "ports",
            f"{NUM_PORTS} ports on 127.0.0.1 cannot be had: {error}",
            "ip link set lo up; sysctl net.ipv4.ip_local_port_range='32768 60999'; ulimit -n 4096",
        )
    else:
        yield ok("ports", f"{NUM_PORTS} ports on 127.0.0.1 are free")


def hostname() -> Iterator[Finding]:
    """Check that the host's own name has an address, for which gloo and NCCL ask."""
    name, found = socket.gethostname(), list[str]()

    def resolve() -> None:
        try:
            found.append(socket.gethostbyname(name))
        except OSError as error:
            found.append(f"! {error.strerror}")

    # A resolver that is not there answers after minutes.
    thread = Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(ANSWER_S)

    answer = found[0] if found else f"! no answer within {ANSWER_S:.0f} s"
    if answer.startswith("! "):
        fix = f"echo '127.0.0.1 {name}' >> /etc/hosts"
        yield problem("host name", f"{name} has no address: {answer[2:]}", fix)
    else:
        yield ok("host name", f"{name} is {answer}")


def sandboxes() -> Iterator[Finding]:
    """Say in which sandbox verifiers run that are not the user's own."""
    match sandbox.kind():
        case sandbox.Kind.BUBBLEWRAP:
            yield ok("sandbox", sandbox.version())

        case sandbox.Kind.SECCOMP:
            yield ok(
                "sandbox",
                f"{seccomp.version()}, since {sandbox.why_no_bubblewrap()}; "
                "a reward in it can read your files",
            )

        case None:
            yield warning(
                "sandbox",
                f"none: {sandbox.why_none()}. A reward that asks for one, as those of "
                f"reasoning-gym do, does not start; {sandbox.FIX}",
            )


def disk(run_dir: Path, needed_bytes: int = DISK_MIN_BYTES) -> Iterator[Finding]:
    """Check the room for checkpoints in the folder that the run writes to."""
    there = next(
        folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists()
    )
    free = shutil.disk_usage(there).free
    text = f"{there} has {_gib(free)} free"

    if not there.is_dir():
        yield problem("disk", f"run_dir={run_dir}: {there} is a file", "another run_dir")
    elif free < needed_bytes:
        yield problem(
            "disk",
            f"{text}, a run needs about {_gib(needed_bytes)}",
            "free some, or set run_dir to a folder on a larger disk",
        )
    else:
        yield ok("disk", text)


def _gib(count: int) -> str:
    return f"{count / GIB:.3g} GiB"
