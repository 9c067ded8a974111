"""Read how ``torchrun`` has started this process, and meet the others.

The process of rank 0 controls the run. It listens, and leaves its address and a token
in the run folder, in a file that only this user can read.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coupler.errors import ConfigError, WorkerDied
from coupler.system.files import DamagedFile, read_json
from coupler.system.gate import BACKLOG, GREETING_S, Gate, greet

FILE = ".torchrun"
RETRY_S = 0.2
LOOPBACK = "127.0.0.1"
NEEDS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START = "torchrun --nproc-per-node=2 -m coupler sft --config run.yaml"


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process among those that ``torchrun`` has started.

    Attributes:
        host: an address of rank 0 that all others reach.
        name: tells this start of the processes from others.
    """

    rank: int
    world: int
    host: str
    name: str

    def overrides(self, given: Sequence[str], written: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a run in these processes.

        Each process is one rank of the engine, where nothing else is said.

        Args:
            given: those of the command line.
            written: what the configuration file says.
        """
        engine = written.get("engine")
        says = isinstance(engine, Mapping) and "ranks" in engine
        ours = ["executor=torchrun"]
        if not says and not any(text.startswith("engine.ranks=") for text in given):
            ours.append(f"engine.ranks={self.world}")
        return [*ours, *given]


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Return how torchrun started this process, or None if it did not.

    Raises:
        ConfigError: a variable of torchrun is missing, or is no number.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    try:
        rank, world, here = (int(environment[name]) for name in NEEDS[:3])
        address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the environment of torchrun lacks a variable or has a wrong one: {error}.\n"
            f"  it has:  {', '.join(NEEDS)}\n  try:  {START}"
        ) from None

    again = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{environment['TORCHELASTIC_RUN_ID']} {address}:{port} {again}"
    return Launch(rank, world, LOOPBACK if here == world else address, name)


def check_world(launch: Launch | None, ranks: int) -> None:
    """Refuse another number of processes than of engine ranks.

    Raises:
        ConfigError: they differ, or torchrun did not start this process.
    """
    if not launch:
        raise ConfigError(
            "executor=torchrun is of processes that torchrun started, and it did not start "
            f"this one.\n  try:  {START}"
        )
    if launch.world != ranks:
        raise ConfigError(
            f"torchrun started {launch.world} processes, and engine.ranks={ranks}: each of them "
            f"is one rank.\n  try:  engine.ranks={launch.world}, or as many processes as ranks"
        )


def listen(launch: Launch, run_dir: Path) -> Gate:
    """Listen for the other processes, and write where into the run folder."""
    server = socket.create_server((launch.host, 0), backlog=BACKLOG)
    token, path = secrets.token_hex(32), run_dir / FILE
    where = {"name": launch.name, "host": launch.host, "port": server.getsockname()[1]}

    part = path.with_name(f"{FILE}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        json.dump({**where, "token": token}, file)
    part.rename(path)
    return Gate(server, token)


def join(launch: Launch, run_dir: Path, seconds: float) -> socket.socket:
    """Connect to the process of rank 0, once it listens.

    Raises:
        WorkerDied: it did not listen within ``seconds``.
    """
    end = time.monotonic() + seconds

    while time.monotonic() < end:
        with suppress(DamagedFile, KeyError, TypeError, OSError):
            at: dict[str, Any] = read_json(run_dir / FILE)
            if at["name"] == launch.name:
                said = {
                    "rank": launch.rank,
                    "pid": os.getpid(),
                    "node": socket.gethostname(),
                }
                return greet(
                    at["host"],
                    at["port"],
                    at["token"],
                    said,
                    GREETING_S,
                )
        time.sleep(RETRY_S)
    raise WorkerDied(
        f"rank {launch.rank} of torchrun did not find rank 0 within {seconds:g} s.\n"
        f"  look at:  the output of rank 0; {run_dir} must be a folder that all nodes share"
    )
