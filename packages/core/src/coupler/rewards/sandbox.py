"""Find the sandbox of this machine, and write the command that runs Python in it.

The sandbox is bubblewrap: no network, no process but its own, files to read alone and
few of them, a folder for temporary files in memory, and an environment without what the
user keeps in his. Where it is missing, ``seccomp`` is the next best, with the same
environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from coupler.rewards import seccomp
from coupler.system.imports import file_of

# The folder of this package.
CORE = Path(__file__).parents[1]
PROBE_S = 2.0
FIX = f"apt-get install bubblewrap, or {seccomp.FIX}"
TMP_BYTES = 256 << 20
# What Python and its libraries read. A folder that is missing is left out.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
)
# Folders that hold more than a program needs, even where one of them is on the path.
WIDE = ("/", "/tmp", "/var", "/var/tmp", "/home", "/root", "/etc", "/run", "/dev", "/proc")  # noqa: S108
ENVIRONMENT = {
    *("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONWARNINGS"),
    *(
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPYCACHEPREFIX",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
    ),
}


class Kind(StrEnum):
    """A sandbox, by the mode of a worker that runs in it."""

    BUBBLEWRAP = "bubblewrap"
    SECCOMP = "seccomp"


def kind() -> Kind | None:
    """Return the best sandbox that this machine has, if any."""
    if not why_no_bubblewrap():
        return Kind.BUBBLEWRAP
    return None if seccomp.why_none() else Kind.SECCOMP


def why_none() -> str:
    """Return why there is no sandbox here, or nothing."""
    if kind():
        return ""
    return f"bubblewrap: {why_no_bubblewrap()}; seccomp: {seccomp.why_none()}"


@lru_cache(1)
def why_no_bubblewrap() -> str:
    """Try bubblewrap once, and return why it cannot be had, or nothing."""
    bwrap = shutil.which("bwrap")
    if sys.platform != "linux":
        return "bubblewrap needs Linux"
    if bwrap is None:
        return "bwrap is not installed"

    trial = [*command(""), sys.executable, "-I", "-S", "-c", "print(6 * 7)"]
    try:
        done = subprocess.run(
            trial, capture_output=True, timeout=PROBE_S, env=environment(), check=False
        )
    except subprocess.TimeoutExpired:
        return f"bwrap did not start Python within {PROBE_S:g} s"
    except OSError as error:
        return f"bwrap cannot be started: {error}"
    if done.stdout.strip() == b"42":
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"]
    return f"bwrap fails: {said[0][:200]}"


def command(target: str) -> list[str]:
    """Return the words before a command that runs it in the sandbox.

    ``target`` is the reward, whose files can be read there.
    """
    paths = readable(target)
    here = Path.cwd()
    inside = any(path in (here, *here.parents) for path in paths)
    return confined(paths, here if inside else Path("/tmp"))  # noqa: S108


def confined(
    paths: list[Path],
    folder: Path,
    namespaces: tuple[str, ...] = ("--unshare-all", "--hostname", "sandbox"),
    capabilities: tuple[str, ...] = (),
) -> list[str]:
    """Return the words of bubblewrap before a command.

    Args:
        paths: files and folders that can be read.
        folder: where the command starts.
        namespaces: the options that part it from the machine.
        capabilities: what it keeps. Everything else is dropped.
    """
    binds = [word for path in paths for word in ("--ro-bind-try", str(path), str(path))]
    kept = [word for name in capabilities for word in ("--cap-add", name)]
    # A folder that is not named here would be the first user's alone.
    above = dict.fromkeys(folder for path in paths for folder in reversed(path.parents[:-1]))
    folders = [word for folder in above for word in ("--dir", str(folder))]

    return [
        *(shutil.which("bwrap") or "bwrap", *namespaces, "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", *kept, "--proc", "/proc", "--dev", "/dev"),
        *_temporary("/tmp"),  # noqa: S108
        *("--dir", "/var/tmp"),  # noqa: S108
        *folders,
        *binds,
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(folder), "--"),
    ]


def readable(target: str) -> list[Path]:
    """Return the files and folders that a reward in the sandbox can read."""
    file = file_of(target)
    wanted = [*interpreter(), CORE]
    wanted += [Path(path).absolute() for path in sys.path if path]
    if file:
        file = file.absolute()
        wanted.append(file if wide(file.parent) else file.parent)
    return narrowed(wanted)


def interpreter() -> list[Path]:
    """Return what this Python and its installed packages read."""
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix)
    return [*map(Path, (*SYSTEM, *prefixes)), Path(sys.executable).resolve().parent]


def narrowed(wanted: list[Path]) -> list[Path]:
    """Return those that exist, but for wide folders and what another one holds."""
    wanted = [*wanted, *(path.resolve() for path in wanted if path.is_symlink() and path.is_dir())]
    found: list[Path] = []

    for path in sorted(dict.fromkeys(wanted), key=lambda path: len(path.parts)):
        covered = any(done in path.parents for done in found)
        if path.exists() and not covered and not wide(path):
            found.append(path)
    return found


def wide(path: Path) -> bool:
    """Return True for a folder that holds other things of the user, too."""
    home = Path.home()
    return path in (home, *home.parents) or str(path) in WIDE


def environment() -> dict[str, str]:
    """Return the variables that a reward in the sandbox gets."""
    kept = {k: v for k, v in os.environ.items() if k in ENVIRONMENT or k.startswith("LC_")}
    return kept | {"HOME": "/tmp", "TMPDIR": "/tmp"}  # noqa: S108


@lru_cache(1)
def version() -> str:
    """Return the name and version of bubblewrap."""
    try:
        done = subprocess.run(
            [shutil.which("bwrap") or "bwrap", "--version"],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "bubblewrap"
    return done.stdout.strip() or "bubblewrap"


def _temporary(path: str) -> list[str]:
    """Return words for a folder in memory, of bounded size where bwrap knows sizes."""
    words = version().rpartition(" ")[2].split(".")[:2]
    numbers = [int(word) for word in words if word.isdigit()]
    # Older ones cannot bound it, and it stays empty.
    sized = ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", path]
    return sized if numbers >= [0, 7] else ["--dir", path]
