"""How long conversations take on four replicas, by the rule that chooses the replica.

    python benchmarks/routing.py [--seeds 8]

Conversations have skewed numbers of turns (Pareto, at most 60), and each turn adds what
was sampled and 100 tokens of a tool. A replica samples for up to 8 requests at full
speed, and for more at a speed that falls. A prompt token that is not cached costs a
tenth of a sampled one. Printed is the time until the last conversation ended, over that
of conversations that keep their first replica: the median over the seeds.

No process, no model and no clock: the simulation calls the router of the rollouts.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from statistics import median

from coupler.interfaces import Completion, Request
from coupler.loop.routing import MARGIN, Router

REPLICAS, FULL_SPEED, PREFILL = 4, 8, 0.1
PROMPT, TOOL, MAX_TOKENS = 500, 100, 200


class Wandering(Router):
    """Leaves an overloaded replica without counting the prefix that is lost."""

    def _choose(self, request: Request, living: object) -> int:
        session = self.sessions.get(request.session)
        lightest = min(range(REPLICAS), key=self.outstanding.__getitem__)
        if session is None or session.replica < 0:
            return lightest
        more = self.outstanding[session.replica] - self.outstanding[lightest]
        return lightest if more > self.margin * median(self.costs) else session.replica


@dataclass(slots=True)
class Running:
    left: float
    session: str
    request: Request
    replica: int
    cost: int
    length: int


class Simulation:
    """Runs conversations, ``at_once`` of them side by side."""

    def __init__(self, router: Router, turns: dict[str, int], seed: int, *, pinned: bool) -> None:
        chance = random.Random(seed)
        self.router, self.pinned, self.now = router, pinned, 0.0
        self.lengths = {
            name: [chance.randrange(20, 180) for _ in range(number)]
            for name, number in turns.items()
        }
        self.prompts = dict.fromkeys(turns, PROMPT)
        self.running: list[list[Running]] = [[] for _ in range(REPLICAS)]

    def run(self, at_once: int) -> float:
        waiting = sorted(self.lengths)
        for name in waiting[:at_once]:
            self.begin(name)
        waiting = waiting[at_once:]

        while any(self.running):
            for done in self.advance():
                if self.lengths[done.session]:
                    self.turn(done.session)
                    continue
                self.router.end(done.session)
                if waiting:
                    self.begin(waiting.pop(0))
        return self.now

    def begin(self, name: str) -> None:
        if self.pinned:
            self.router.begin(name)
        self.turn(name)

    def turn(self, name: str) -> None:
        size, length = self.prompts[name], self.lengths[name].pop()
        request = Request((0,) * size, MAX_TOKENS, session=name)
        session = self.router.sessions.get(name)
        before, cached = (session.replica, session.cached) if session else (-1, 0)

        index, cost = self.router.start(request, range(REPLICAS))
        work = PREFILL * max(0, size - (cached if index == before else 0)) + length
        self.running[index].append(Running(work, name, request, index, cost, length))
        self.prompts[name] += length + TOOL

    def advance(self) -> list[Running]:
        """Go on until the next request ends, and return those that ended."""
        speeds = [min(1.0, FULL_SPEED / max(1, len(busy))) for busy in self.running]
        pairs = [(busy, speed) for busy, speed in zip(self.running, speeds, strict=True) if busy]
        step = min(min(one.left for one in busy) / speed for busy, speed in pairs)
        self.now += step

        ended = []
        for busy, speed in pairs:
            for one in busy:
                one.left -= step * speed
            ended += [one for one in busy if one.left < 1e-6]
            busy[:] = [one for one in busy if one.left >= 1e-6]
        for one in ended:
            completion = Completion((0,) * one.length, (), (), "stop")
            self.router.finish(one.request, one.replica, one.cost, completion)
        return ended


def skewed(sessions: int, seed: int) -> dict[str, int]:
    chance = random.Random(1000 * sessions + seed)
    return {f"{i:04}": min(60, int(2 * chance.paretovariate(0.7))) for i in range(sessions)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=8)
    seeds = range(parser.parse_args().seeds)

    print("| sessions | at once | rule | time over pinned | migrations | hits |")
    print("|---|---|---|---|---|---|")
    for sessions, at_once in ((64, 64), (200, 64), (200, 32)):
        pinned = [
            Simulation(Router(REPLICAS), skewed(sessions, s), s, pinned=True).run(at_once)
            for s in seeds
        ]
        for name, kind in ((f"margin {MARGIN:g}", Wandering), ("with the prefix", Router)):
            ratios, moves, hits = [], [], []
            for seed in seeds:
                router = kind(REPLICAS)
                took = Simulation(router, skewed(sessions, seed), seed, pinned=False).run(at_once)
                metrics = router.metrics()
                ratios.append(took / pinned[seed])
                moves.append(metrics["rollout/migrations"].value)
                hits.append(metrics["rollout/session_hits"].value)
            print(
                f"| {sessions} | {at_once} | {name} | {median(ratios):.2f} | "
                f"{median(moves):.0f} | {median(hits):.2f} |"
            )


if __name__ == "__main__":
    main()
