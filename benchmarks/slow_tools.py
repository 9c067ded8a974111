"""Measure how much of an engine's busy throughput episodes with slow tools keep.

    python benchmarks/slow_tools.py --rollout vllm --shape 0.5b
    python benchmarks/slow_tools.py --rollout hf --shape tiny --sessions 4 \\
        --tokens 64 --tool-s 0.2 --warm-s 2 --window-s 6 --rounds 1   # anywhere

Each turn samples about 256 tokens, and a tool that sleeps 0 to 5 s follows it. Weights
are random and call no tools, so the environment of this script plays a fixed number of
turns through the real ``Episodes`` and ``Conversation``. Three cases take turns:

busy: 256 sessions without tools, so 256 requests are always in the engine.
same: 256 sessions with tools. Most of them may be waiting for a tool.
more: with tools, and so many sessions that 256 of them are in the engine.

The bound: a turn takes t seconds in the busy engine and a tool d seconds in the mean.
A session is then in the engine for the share t / (t + d) of its time, so *same* has
256 t / (t + d) requests in flight and cannot keep more throughput than the engine has
with so few. To fill the engine needs 256 (1 + d / t) sessions, and some more since
their number in it varies: its standard deviation is sqrt(256 d / (t + d)), and *more*
adds two of these. A run chooses this number by ``prompts_per_step``,
``samples_per_prompt`` and ``max_staleness``.

At most 256 requests are in the engine in every case. The others wait in line, which is
not counted as in flight. Tokens are those of a window: a request that began before it
or ended after it counts for the share of its time inside.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from shapes import SHAPES, write_shape

from coupler.conversation import Message, Parsed
from coupler.conversation.episodes import Episodes
from coupler.data import Prompt
from coupler.data.dataset import Row
from coupler.interfaces import (
    Completion,
    Environment,
    EnvironmentConfig,
    Model,
    Outcome,
    Policy,
    Rank,
    Request,
    Task,
)
from coupler.plugins.manager import Plugins
from coupler.testing.models import VOCAB, write_toy
from coupler.testing.subject import configured, parse_settings

RESULT = 32  # tokens that a tool returns


@dataclass
class Engine:
    """The rollout with at most ``room`` requests in it, and when each was there."""

    rollout: Any
    room: asyncio.Semaphore
    over: bool = False
    done: list[tuple[float, float, int]] = field(default_factory=list)

    async def generate(self, request: Request) -> Completion:
        """Sample a turn. Its limit of tokens ends the turn and not the episode."""
        async with self.room:
            start = time.perf_counter()
            done = await self.rollout.generate(request)
            self.done.append((start, time.perf_counter(), len(done.tokens)))
        return replace(done, finish="stop")

    def within(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Return seconds and tokens of each request in a window."""
        for began, ended, tokens in self.done:
            inside = max(0.0, min(ended, end) - max(began, start))
            yield inside, tokens * inside / max(ended - began, 1e-9)


class NoText:
    """A renderer of a caller that keeps ids: no text, and no token that ends a turn."""

    stop: tuple[int, ...] = ()

    def render(self, messages: Any, tools: Any) -> tuple[int, ...]:
        raise NotImplementedError

    def extend(self, history: Any, ids: Any, new: Any, tools: Any) -> None:
        raise NotImplementedError

    def parse(self, ids: Any, prompt: Any, tools: Any) -> Parsed:
        raise NotImplementedError


class SlowTools(Environment):
    """Plays a fixed number of turns, with a tool that sleeps after each."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace, tool_s: float) -> None:
        super().__init__(EnvironmentConfig("slow_tools", max_turns=arguments.turns))
        self.engine, self.tool_s, self.arguments = engine, tool_s, arguments

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play until the last turn, or until the measurement is over."""
        random, tokens = Random(task.seed), self.arguments.tokens
        ids = self._words(random, self.arguments.prompt)

        for turn in range(self.arguments.turns):
            if self.engine.over and turn:
                break
            length = random.randint(tokens - tokens // 2, tokens + tokens // 2)
            done = await policy.sample(ids, length)
            assert len(done.tokens) == length, "the model has too few positions"
            ids += done.tokens + await self._tool(random)
        return Outcome(reward=0.0)

    async def _tool(self, random: Random) -> tuple[int, ...]:
        seconds = random.uniform(0.0, 2 * self.tool_s)
        if seconds:
            await asyncio.sleep(seconds)
        return self._words(random, RESULT)

    def _words(self, random: Random, length: int) -> tuple[int, ...]:
        return tuple(random.randrange(5, self.arguments.vocabulary) for _ in range(length))


@dataclass(frozen=True)
class Found:
    """One measurement: means over the window."""

    sessions: int
    tokens_per_s: float
    in_flight: float
    turn_s: float


async def measure(
    rollout: Any, arguments: argparse.Namespace, sessions: int, tool_s: float, seeds: Iterator[int]
) -> Found:
    """Keep so many sessions going, and measure when they are spread over their
    turns.
    """
    engine = Engine(rollout, asyncio.Semaphore(arguments.sessions))
    environment = SlowTools(engine, arguments, tool_s)
    longest = arguments.turns * (2 * arguments.tokens + RESULT) + arguments.prompt
    episodes = Episodes(environment, environment.config, engine, NoText(), longest)
    request = Request((), 2 * arguments.tokens)
    message: Message = {"role": "user", "content": ""}

    async def session() -> None:
        while not engine.over:
            seed = next(seeds)
            prompt = Prompt(Row("", "", seed, {}), (), (message,))
            name = f"episode {seed}"
            played = await episodes.play(prompt, replace(request, seed=seed, session=name))
            assert len(played.rows) == 1, "an episode is more than one row"

    running = [asyncio.create_task(session()) for _ in range(sessions)]
    await asyncio.sleep(arguments.warm_s)
    start = time.perf_counter()
    await asyncio.sleep(arguments.window_s)
    end = time.perf_counter()
    engine.over = True
    await asyncio.gather(*running)

    assert not episodes.num_failed, episodes.first_failure
    seconds, tokens = map(sum, zip(*engine.within(start, end), strict=True))
    turns = [ended - began for began, ended, _ in engine.done if began < end and ended > start]
    wall = end - start
    return Found(sessions, tokens / wall, seconds / wall, statistics.mean(turns))


def enough(room: int, turn_s: float, tool_s: float) -> int:
    """Return how many sessions keep ``room`` of them in the engine: see the bound."""
    spread = math.sqrt(room * tool_s / (turn_s + tool_s))
    return math.ceil((room + 2 * spread) * (1 + tool_s / turn_s))


async def compare(rollout: Any, arguments: argparse.Namespace) -> dict[str, list[Found]]:
    """Measure the cases by turns."""
    found: dict[str, list[Found]] = {"busy": [], "same": [], "more": []}
    seeds = count(1)  # no two episodes of a process share a prefix
    tool_s = arguments.tool_s / 2

    for number in range(arguments.rounds):
        busy = await measure(rollout, arguments, arguments.sessions, 0.0, seeds)
        same = await measure(rollout, arguments, arguments.sessions, tool_s, seeds)
        sessions = arguments.episodes or enough(arguments.sessions, busy.turn_s, tool_s)
        more = await measure(rollout, arguments, sessions, tool_s, seeds)

        for name, one in zip(found, (busy, same, more), strict=True):
            found[name].append(one)
            print(f"round {number} {name}: {one}", flush=True)
    return found


def report(found: dict[str, list[Found]], arguments: argparse.Namespace) -> None:
    """Print medians, and the ratios to the busy engine."""
    for name, rounds in found.items():
        ratios = [
            one.tokens_per_s / busy.tokens_per_s
            for one, busy in zip(rounds, found["busy"], strict=True)
        ]
        rate = statistics.median(one.tokens_per_s for one in rounds)
        flight = statistics.median(one.in_flight for one in rounds)
        turn_s = statistics.median(one.turn_s for one in rounds)
        sessions = " ".join(str(one.sessions) for one in rounds)
        print(
            f"RESULT {arguments.rollout} {arguments.shape} {name}: {rate:,.0f} tokens/s, ratio "
            f"{statistics.median(ratios):.3f} ({', '.join(f'{r:.3f}' for r in ratios)}), "
            f"in flight {flight:.1f}, turn {turn_s:.2f} s, sessions {sessions}"
        )
    turn_s = statistics.median(one.turn_s for one in found["busy"])
    share = turn_s / (turn_s + arguments.tool_s / 2)
    print(
        f"RESULT bound: a session is in the engine for {share:.3f} of its time, so "
        f"{arguments.sessions} sessions keep {arguments.sessions * share:.1f} in flight"
    )


async def start(folder: Path, arguments: argparse.Namespace) -> Any:
    """Start the rollout on random weights, and fill it once."""
    backend = Plugins.load().get("rollout", arguments.rollout)
    settings = parse_settings(arguments.settings).get("rollout", {})
    rollout = backend.load()(configured(backend.config, settings), Model(str(folder)))

    await rollout.setup(Rank(seed=1))
    request = Request(tuple(range(5, 5 + arguments.prompt)), arguments.tokens)
    requests = [replace(request, seed=i) for i in range(arguments.sessions)]
    await asyncio.gather(*map(rollout.generate, requests))
    return rollout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollout", choices=("vllm", "sglang", "hf", "toy"), default="vllm")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b", help="toy has its own")
    parser.add_argument("--sessions", type=int, default=256, help="that the engine holds")
    parser.add_argument("--episodes", type=int, default=0, help="of *more*; 0: by the bound")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of a turn, half to 1.5 of it")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the first prompt")
    parser.add_argument("--tool-s", type=float, default=5.0, help="the slowest tool")
    parser.add_argument("--warm-s", type=float, default=12.0, help="before the window")
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="rollout.KEY=VALUE")
    arguments = parser.parse_args()
    toy = arguments.rollout == "toy"
    arguments.vocabulary = VOCAB if toy else SHAPES[arguments.shape]["vocab_size"]

    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner:
        folder = Path(name)
        if toy:
            write_toy(folder)
        else:
            write_shape(folder, arguments.shape)
        rollout = runner.run(start(folder, arguments))
        try:
            report(runner.run(compare(rollout, arguments)), arguments)
        finally:
            rollout.close()


if __name__ == "__main__":
    main()
