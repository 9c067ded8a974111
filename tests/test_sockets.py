"""Every socket on which a run listens is in the table of SECURITY.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from listeners import Listener, listeners
from tests.faults.toy_runs import arguments, write_inputs

from coupler.engine_kit.rendezvous import keep_port

SECURITY = Path(__file__).parents[1] / "SECURITY.md"
HEAD = "| run | process | sockets | on one machine | on several | who is let in |"
LOOPBACK = re.compile(r"(127\.\d+\.\d+\.\d+|::1):\d+")
LIMIT_S = 600.0
TOY = ("steps=3",)
# two ranks that meet as an engine's do, reduce something, and wait for the end of stdin
RANK = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from coupler.engine_kit.process_group import join
from coupler.interfaces import Rank

index, port, logs = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
(logs / f"policy-{index}.log").write_text(f"pid {os.getpid()} on node 127.0.0.1")
join(Rank(index=index, world=2, rendezvous=f"127.0.0.1:{port}"), torch.device("cpu"))
dist.all_reduce(torch.ones(3))
print("met", flush=True)
sys.stdin.read()
"""
# the options of each run, and the words of the table's first column that are true of it
RUNS = {
    "inproc": (("executor=local", *TOY), {"any"}),
    "disk": (("executor=local", "sync.transport=disk", *TOY), {"any"}),
    "ray": (("executor=ray", "rollout.replicas=2", *TOY), {"any", "ray", "tcp"}),
}


@dataclass(frozen=True)
class Row:
    """Sockets that one process of some runs has."""

    run: str
    process: str
    kind: str
    most: int
    place: str


def rows() -> list[Row]:
    """Read the table of SECURITY.md."""
    lines = SECURITY.read_text().splitlines()
    start = lines.index(HEAD) + 2
    found = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        run, process, sockets, place, _, let_in = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        most, kind = re.fullmatch(r"(\d+) (tcp|udp|unix)", sockets).groups()  # type: ignore[union-attr]
        assert let_in, line
        found.append(Row(run.strip("`"), process.strip("`"), kind, int(most), place))
    return found


def problems(found: set[Listener], kinds: set[str], table: list[Row]) -> list[str]:
    """Compare what listened with the rows for runs of these kinds."""
    allowed: Counter[tuple[str, str]] = Counter()
    places: dict[tuple[str, str], str] = {}
    for row in table:
        if row.run in kinds:
            allowed[row.process, row.kind] += row.most
            places[row.process, row.kind] = row.place

    wrong = []
    for each in sorted(found):
        # ranks and replicas of one role have the same rows
        key = re.sub(r"-\d+$", "", each.process), each.kind
        rows_of_one = re.sub(r"-0$", " 0", each.process), each.kind
        if key not in allowed and rows_of_one not in allowed:
            wrong.append(f"{each} is not in the table")
        elif each.kind != "unix" and not LOOPBACK.fullmatch(each.address):
            wrong.append(f"{each} is beyond loopback")
    counted = Counter((each.process, each.kind) for each in found)
    for (process, kind), number in counted.items():
        most = allowed[re.sub(r"-\d+$", "", process), kind]
        most += allowed[re.sub(r"-0$", " 0", process), kind] if process.endswith("-0") else 0
        if number > most:
            wrong.append(f"{process} has {number} sockets of {kind}, the table {most}")
    return wrong


def seen(given: list[str], run_dir: Path) -> set[Listener]:
    """Run a command, and return all that ever listened in it."""
    with run_dir.with_suffix(".txt").open("w") as said:
        command = [sys.executable, "-m", "coupler.cli", *given]
        run = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ})
    found: set[Listener] = set()
    end = time.monotonic() + LIMIT_S
    while run.poll() is None and time.monotonic() < end:
        found |= listeners(run.pid, run_dir / "logs")
        time.sleep(0.1)
    run.kill()
    assert run.wait() == 0, run_dir.with_suffix(".txt").read_text()[-3000:]
    # a worker listens a moment before its log names it, and a process that ends has no
    # title for a moment
    named = {(each.kind, each.address) for each in found if each.process}
    return {
        each
        for each in found
        if not re.match(r"ray::|.*default_worker", each.process)
        and (each.process or (each.kind, each.address) not in named)
    }


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
@pytest.mark.parametrize("name", RUNS)
def test_every_listening_socket_is_in_the_table(name: str, tmp_path: Path) -> None:
    options, kinds = RUNS[name]
    write_inputs(tmp_path / "in")
    found = seen(arguments(tmp_path / "in", tmp_path / "run", *options), tmp_path / "run")
    print(*sorted(found), sep="\n")
    assert problems(found, kinds, rows()) == []
    assert bool(found) == (kinds != {"any"})


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    port, kept = keep_port("127.0.0.1")
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(i), str(port), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        for i in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout and rank.stdout.readline() == b"met\n"
        found = {
            Listener(f"policy-{i}", each.kind, each.address)
            for i, rank in enumerate(ranks)
            for each in listeners(rank.pid, tmp_path)
        }
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        kept.close()
    print(*sorted(found), sep="\n")
    assert found and problems(found, {"torch"}, rows()) == []


def test_a_socket_that_the_table_lacks_is_found() -> None:
    table = [Row("ray", "raylet", "tcp", 1, "loopback"), Row("tcp", "policy 0", "tcp", 1, "")]
    one = Listener("raylet", "tcp", "127.0.0.1:7")
    assert problems({one}, {"ray"}, table) == []
    assert problems({Listener("policy-0", "tcp", "127.0.0.1:7")}, {"tcp"}, table) == []
    for other in (
        {one, Listener("raylet", "tcp", "127.0.0.1:8")},
        {Listener("raylet", "tcp", "0.0.0.0:7")},
        {Listener("raylet", "tcp", ":::7")},
        {Listener("raylet", "tcp", "192.0.2.2:7")},
        {Listener("raylet", "udp", "127.0.0.1:7")},
        {Listener("driver", "tcp", "127.0.0.1:7")},
        {Listener("policy-1", "tcp", "127.0.0.1:7")},
    ):
        assert problems(other, {"ray", "tcp"}, table), other


def test_a_socket_is_found() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        held = listeners(os.getpid(), Path("nowhere"))
    assert Listener("driver", "tcp", f"127.0.0.1:{port}") in held
