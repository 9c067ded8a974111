"""Find every socket on which a run listens, and who holds it."""

from __future__ import annotations

import os
import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# states of /proc/net/tcp and /proc/net/unix
LISTENS, ACCEPTS = "0A", 1 << 16
# what the titles of Ray's own processes hold; the logs of workers name the rest
TITLES = {
    "gcs/gcs_server": "gcs_server",
    "raylet/raylet": "raylet",
    "DashboardAgent": "dashboard agent",
    "RuntimeEnvAgent": "environment agent",
    "dashboard.py": "dashboard",
    "SubprocessModule": "dashboard",
    "log_monitor": "log monitor",
    "monitor.py": "autoscaler",
    "coupler.rewards.worker": "reward worker",
    "system/processes.py": "watcher",
}


@dataclass(frozen=True, order=True)
class Listener:
    """One socket that listens."""

    process: str
    kind: str
    address: str


def below(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    found, todo = {pid}, [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children = [int(word) for word in task.read_text().split()]
                found |= set(children)
                todo += children
    return found


def listeners(pid: int, logs: Path) -> set[Listener]:
    """Return what listens now in a run: the process ``pid`` and those below it.

    Args:
        logs: the folder with the logs of the workers, which name them.
    """
    owners: dict[str, str] = {}
    workers = _workers(logs)
    for each in below(pid):
        name = "driver" if each == pid else workers.get(each) or _title(each)
        with suppress(OSError):
            for handle in os.listdir(f"/proc/{each}/fd"):
                with suppress(OSError):
                    target = os.readlink(f"/proc/{each}/fd/{handle}")
                    if target.startswith("socket:["):
                        owners.setdefault(target[8:-1], name)

    return {*_inet(owners), *_unix(owners)}


def _workers(logs: Path) -> dict[int, str]:
    found = {}
    for log in logs.glob("*.log"):
        for number in re.findall(r"pid (\d+) on node", log.read_text(errors="replace")):
            found[int(number)] = log.stem
    return found


def _title(pid: int) -> str:
    title = ""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return next((name for mark, name in TITLES.items() if mark in title), title.strip()[:60])


def _inet(owners: dict[str, str]) -> set[Listener]:
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in owners:
                found.add(Listener(owners[fields[9]], "tcp", _address(fields[1])))
    # a socket of UDP that is bound takes what comes; one that is connected has a peer
    for kind in ("udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in owners and set(fields[2].partition(":")[0]) == {"0"}:
                found.add(Listener(owners[fields[9]], "udp", _address(fields[1])))
    return found


def _address(text: str) -> str:
    """Turn the words of /proc, each in the order of this machine, into host:port."""
    words, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    host = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return f"{host.removeprefix('::ffff:')}:{int(port, 16)}"


def _unix(owners: dict[str, str]) -> set[Listener]:
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & ACCEPTS and fields[6] in owners:
            found.add(Listener(owners[fields[6]], "unix", fields[7] if len(fields) > 7 else "@"))
    return found
