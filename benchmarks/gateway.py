"""Time the gateway: many episodes at once, each of several turns over HTTP.

``python benchmarks/gateway.py`` plays 2,000 sessions of 8 turns with a scripted policy.
A second process is the client, so that its time is not counted. It prints the CPU time
of the controller for each turn, the lag of its event loop and the time in its garbage
collector, with machine, versions and command. ``--parts`` times the recorder alone too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np

from coupler.conversation import Codec, Conversation, Limits, TemplateRenderer
from coupler.interfaces import Completion, Model, Request
from coupler.system.garbage import heap_set_aside
from coupler.testing.models import write_tokenizer
from coupler_agents.gateway import Gateway

# Each wake takes 0.1 ms of CPU, which must not count: 20 a second.
TICK_S = 0.05
WORDS = ("the", "answer", "is", "yes", "no", "maybe", "hello", "world")
ANSWER = "the answer is 3 . yes no maybe hello world"
LIMIT_S = 900.0


def asked(session: int, turn: int) -> str:
    """Return a question that no other turn asks, or next to none."""
    words = Random(f"{session} {turn}").choices(WORDS, k=6)
    return f"what is {' '.join(words)} ? go on"


class Scripted:
    """A policy that always says the same, after half to one and a half of a time."""

    def __init__(self, ids: tuple[int, ...], seconds: float) -> None:
        self.ids, self.seconds = ids, seconds
        self.random = Random(0)

    async def generate(self, request: Request) -> Completion:
        """Sample the answer."""
        await asyncio.sleep(self.seconds * (0.5 + self.random.random()))
        size = len(self.ids)
        return Completion(
            self.ids,
            (-0.5,) * size,
            (0,) * size,
            "stop",
        )


def conversations(number: int, folder: Path, seconds: float) -> list[Conversation]:
    """Return new conversations of one model."""
    codec = Codec(Model(str(folder)))
    renderer = TemplateRenderer(codec)
    rollout = Scripted(codec.target_ids(ANSWER), seconds)
    limits = Limits(completion_tokens=64)
    return [Conversation(rollout, renderer, limits, Request((), 1, seed=i)) for i in range(number)]


async def lags(found: list[float]) -> None:
    """Measure how late the event loop wakes, in seconds."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        found.append(loop.time() - due)


def watch_collector(found: list[float]) -> None:
    """Measure each pause for the garbage collector, in seconds."""
    began = 0.0

    def on(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.monotonic()
        else:
            found.append(time.monotonic() - began)

    gc.callbacks.append(on)


async def serve(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Serve all episodes to a client in a process of its own, and measure."""
    made = conversations(arguments.sessions, folder, arguments.policy_s)
    gateway = Gateway()
    await gateway.start()
    sessions = [gateway.open(conversation) for conversation in made]
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        f"--client={gateway.url}",
        f"--turns={arguments.turns}",
        f"--spread-s={arguments.spread_s}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )

    late: list[float] = []
    pauses: list[float] = []
    watch_collector(pauses)
    ticking = asyncio.create_task(lags(late))
    before, start = time.process_time(), time.monotonic()
    keys = json.dumps([session.api_key for session in sessions]).encode()
    out, _ = await asyncio.wait_for(client.communicate(keys), LIMIT_S)
    cpu, wall = time.process_time() - before, time.monotonic() - start
    ticking.cancel()

    done = json.loads(out)
    turns = sum(len(conversation.tree.turns) for conversation in made)
    assert done["answers"] == turns == arguments.sessions * arguments.turns, (done, turns)
    for session in sessions:
        gateway.end(session)
    assert all(len(conversation.close()) == 1 for conversation in made)
    await gateway.close()
    return {
        "turns": turns,
        "seconds": wall,
        "cpu_ms_per_turn": 1e3 * cpu / turns,
        "lag_p50_ms": 1e3 * float(np.quantile(late, 0.5)),
        "lag_p99_ms": 1e3 * float(np.quantile(late, 0.99)),
        "lag_max_ms": 1e3 * max(late),
        "gc_ms_per_turn": 1e3 * sum(pauses) / turns,
        "gc_max_ms": 1e3 * max(pauses, default=0.0),
        "latency_p50_ms": done["p50_ms"],
        "latency_p99_ms": done["p99_ms"],
    }


async def recorder(arguments: argparse.Namespace, folder: Path) -> float:
    """Return the CPU time of a turn without HTTP, in milliseconds."""
    made = conversations(arguments.sessions // 4, folder, 0.0)
    questions = [[asked(i, turn) for turn in range(arguments.turns)] for i in range(len(made))]
    before = time.process_time()
    for conversation, its in zip(made, questions, strict=True):
        history: list[dict[str, object]] = []
        for question in its:
            history.append({"role": "user", "content": question})
            reply = await conversation.chat(history)
            history.append(dict(reply.message))
    return 1e3 * (time.process_time() - before) / (len(made) * arguments.turns)


async def play(arguments: argparse.Namespace, keys: list[str]) -> dict[str, float]:
    """Play all episodes at once, each over a connection of its own."""
    import aiohttp

    latencies: list[float] = []

    async def episode(number: int, key: str, http: aiohttp.ClientSession) -> None:
        await asyncio.sleep(arguments.spread_s * number / len(keys))
        history: list[dict[str, str]] = []
        for turn in range(arguments.turns):
            history.append({"role": "user", "content": asked(number, turn)})
            start = time.monotonic()
            async with http.post(
                f"{arguments.client}/v1/chat/completions",
                json={"model": "policy", "messages": history, "temperature": 1.0},
                headers={"Authorization": f"Bearer {key}"},
            ) as response:
                answer = await response.json()
            latencies.append(time.monotonic() - start)
            history.append(answer["choices"][0]["message"])

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        await asyncio.gather(*(episode(i, key, http) for i, key in enumerate(keys)))
    p50, p99 = np.quantile(latencies, [0.5, 0.99])
    return {"answers": len(latencies), "p50_ms": 1e3 * float(p50), "p99_ms": 1e3 * float(p99)}


def describe() -> str:
    """Return machine, versions and command."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    names = ("aiohttp", "orjson", "transformers", "tokenizers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores of {cpu}, load {load:.1f}; Python "
        f"{platform.python_version()}, {versions}; {' '.join(sys.argv)}"
    )


def measured(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Serve, under a profiler if one is asked for."""
    if not arguments.profile:
        return asyncio.run(serve(arguments, folder))
    import cProfile

    profile = cProfile.Profile()
    found = profile.runcall(asyncio.run, serve(arguments, folder))
    profile.dump_stats(arguments.profile)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--policy-s", type=float, default=4.0, help="seconds of a turn")
    parser.add_argument("--spread-s", type=float, default=32.0, help="in which episodes start")
    parser.add_argument("--parts", action="store_true", help="time the recorder alone too")
    parser.add_argument("--profile", default="", help="a file for the profile of the controller")
    parser.add_argument("--client", default="", help="run as the client of this address")
    arguments = parser.parse_args()

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.client:
        print(json.dumps(asyncio.run(play(arguments, json.load(sys.stdin)))))
        return

    print(describe())
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        if arguments.parts:
            alone = asyncio.run(recorder(arguments, folder))
            print(f"recorder alone: {alone:.3f} ms of CPU a turn")
        gc.collect()
        with heap_set_aside():  # as a run does before its first step
            found = measured(arguments, folder)
    print(", ".join(f"{name}={value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
