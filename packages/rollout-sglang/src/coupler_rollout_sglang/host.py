"""Hold an engine in a process tree of its own.

A rollout runs it as ``python -m coupler_rollout_sglang.host``.

SGLang ends the process that started it when one of its own fails, and it sets handlers
of signals. The rollout's process therefore starts this one, and speaks to it over a
socket that nobody else has. With ``serve`` it starts SGLang's HTTP server instead.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from coupler.errors import ConfigError, CouplerError
from coupler_rollout_sglang.arguments import (
    adapter_arguments,
    folder_arguments,
    server_arguments,
)
from coupler_rollout_sglang.compat import engine as sglang
from coupler_rollout_sglang.compat.version import installed, prepare
from coupler_rollout_sglang.config import Mode, Precision, SGLangConfig
from coupler_rollout_sglang.hooks import Wanted
from coupler_rollout_sglang.wire import Wire

LOOK_S = 0.5
"""Seconds between two looks at whether all processes of the engine live."""


def main() -> None:
    """Start what the first message asks for, and answer calls until the socket ends."""
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    asked = wire.receive()
    owned = asked["parent"], asked["folder"]
    threading.Thread(target=end_with, args=owned, daemon=True).start()
    try:
        hold(asked, wire)
    except (BrokenPipeError, ConnectionResetError):
        # Who started this was killed, and an engine that dies of it says so too late.
        end(asked["folder"])


def hold(asked: dict[str, Any], wire: Wire) -> None:
    """Start the engine, say that it runs or why not, and answer calls.

    Raises:
        BrokenPipeError, ConnectionResetError: nobody is there any more.
    """
    try:
        arguments, facts = prepared(asked)
        if asked["serve"]:
            wire.send(facts)
            sglang.serve(arguments | asked["serve"], watch_all)
            return
        engine = sglang.start(arguments)
    except CouplerError as error:
        wire.send({"error": [type(error).__name__, str(error)]})
        return
    except Exception as error:
        wire.send({"error": ["start", f"{type(error).__name__}: {error}"]})
        raise

    watch_all()
    wire.send(facts)
    engine.loop.run_until_complete(answer(engine, wire))
    end(asked["folder"])


def prepared(asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the engine's arguments, and what the rollout has to know of it."""
    installed()
    config = config_of(asked["config"])
    gpu = has_gpu()
    prepare(gpu=gpu)
    Wanted(
        config.per_request_seeds,
        config.quantization,
        config.routed_experts,
        asked.get("gate", ""),
    ).announce()

    # The sockets between SGLang's processes lie in a folder that is ours alone.
    tempfile.tempdir = os.environ["TMPDIR"] = asked["folder"]
    model, seed, trusted = asked["model"], asked["seed"], asked["trust_remote_code"]
    arguments = server_arguments(config, model, seed, trusted, gpu=gpu)
    if asked.get("own_weights"):
        arguments |= folder_arguments()
    if rank := config.max_lora_rank:
        place = Path(asked["folder"]) / "adapter"
        arguments |= adapter_arguments(rank, Path(model), place, gpu=gpu)
    if unknown := sorted(arguments.keys() - sglang.server_fields()):
        raise ConfigError(
            f"rollout.extra_args.{unknown[0]} is no server argument of SGLang {installed()}."
        )
    return arguments, {"gpu": gpu, "context": arguments["context_length"]}


def config_of(fields: dict[str, Any]) -> SGLangConfig:
    """Return the configuration that came as JSON."""
    typed = {"dtype": Precision(fields["dtype"]), "mode": Mode(fields["mode"])}
    return SGLangConfig(**{**fields, **typed})


def has_gpu() -> bool:
    """Tell if this process sees a GPU."""
    import torch

    return torch.cuda.is_available()


async def answer(engine: Any, wire: Wire) -> None:
    """Answer calls, many at a time, until the other side is gone."""
    reader, writer = await wire.streams()
    tasks: set[asyncio.Task[None]] = set()

    async def one(asked: dict[str, Any]) -> None:
        try:
            status, made = await sglang.call(engine, asked["call"], asked["body"])
        except Exception as error:
            status, made = 500, {"message": f"{type(error).__name__}: {error}"}
        writer({"id": asked["id"], "status": int(status), "answer": made})

    while (asked := await reader()) is not None:
        task = asyncio.create_task(one(asked))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def end_with(parent: int, folder: str) -> None:
    """End all of the engine when the process that started this one has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    end(folder)


def watch_all() -> None:
    """Watch the processes that run now, once the engine has all that it needs."""
    threading.Thread(target=watch, args=(children(),), daemon=True).start()


def children() -> list[int]:
    """Return the processes that this one started."""
    listed = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    with open(listed) as file:
        return [int(pid) for pid in file.read().split()]


def watch(pids: list[int]) -> None:
    """End all of the engine when one of its processes ends."""
    while all(lives(pid) for pid in pids):
        time.sleep(LOOK_S)
    end()


def lives(pid: int) -> bool:
    """Tell if a process runs: one that ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end(folder: str = "") -> None:
    """Kill this process and all that it started: they are a group of their own.

    Args:
        folder: what nobody else removes, if there is anything.
    """
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
