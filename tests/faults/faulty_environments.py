"""Environments with one fault each."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from dataclasses import replace
from typing import Any

from tests.faults.faulty import fault

from coupler.conversation import ConversationOver
from coupler.interfaces import Outcome, Policy, Task
from coupler.testing.toy_environment import ToyEnvironment


class Spoken(ToyEnvironment):
    """The game of numbers, with a hook before and behind an episode."""

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode."""
        task = await self.before(task)
        return await self.behind(await super().episode(task, policy), policy)

    async def before(self, task: Task) -> Task:
        """Return the task that is played."""
        return task

    async def behind(self, outcome: Outcome, policy: Policy) -> Any:
        """Return what the episode returns."""
        return outcome


@fault("environment", **{})
def honest_environment() -> type:
    return type("Honest", (Spoken,), {})


OUTCOMES = {
    "nothing": lambda o: None,
    "a_number": lambda o: o.reward,
    "nan": lambda o: replace(o, reward=float("nan")),
    "infinity": lambda o: replace(o, reward=float("inf")),
    "a_text": lambda o: replace(o, reward="1"),
    "beyond_float32": lambda o: replace(o, reward=1e60),
    "a_turn_too_few": lambda o: replace(o, turn_rewards=o.turn_rewards[1:] or (0.0, 0.0)),
    "nan_of_a_turn": lambda o: replace(o, turn_rewards=(float("nan"),) * len(o.turn_rewards)),
    "nan_of_a_metric": lambda o: replace(o, metrics={"guesses": float("nan")}),
    "text_of_a_metric": lambda o: replace(o, metrics={"guesses": "three"}),
    "an_answer_in_bytes": lambda o: replace(o, answer=b"3"),
    "chance": lambda o: replace(o, reward=o.reward + random.random()),
    "the_clock": lambda o: replace(o, reward=o.reward + time.time() % 1),
}


@fault("environment", how=tuple(OUTCOMES))
def an_outcome_of(how: str) -> type:
    async def behind(self: Any, outcome: Outcome, policy: Policy) -> Any:
        return OUTCOMES[how](outcome)

    return type("Ends", (Spoken,), {"behind": behind})


@fault("environment", how=("task", "count", "hint", "seed"))
def episodes_share_their(how: str) -> type:
    class Shares(Spoken):
        num, task, seed = 0, None, 0

        async def before(self, task: Task) -> Task:
            self.num += 1
            self.task = task
            if how == "hint":
                hint = {"role": "user", "content": f"This is game {self.num}."}
                return replace(task, messages=(*task.messages, hint))
            if how == "seed":
                self.seed = self.seed or task.seed
                return replace(task, seed=self.seed)
            await asyncio.sleep(0.01)
            return self.task if how == "task" else task

        async def behind(self, outcome: Outcome, policy: Policy) -> Any:
            extra = self.num if how == "count" else 0
            return replace(outcome, reward=(outcome.reward or 0) + extra)

    return Shares


@fault("environment", how=("row", "message"))
def the_task_is_written_to(how: str) -> type:
    async def before(self: Any, task: Task) -> Task:
        held: Any = task.row if how == "row" else task.messages[0]
        held["seen" if how == "row" else "content"] = "seen"
        return task

    return type("Writes", (Spoken,), {"before": before})


CHOKES = {
    "nothing": lambda text: not text,
    "no_number": lambda text: not text.strip().isdigit(),
    "a_long_answer": lambda text: len(text) > 10_000,
    "control_characters": lambda text: "\x00" in text,
    "a_broken_call": lambda text: text.startswith("<tool_call>"),
    "other_letters": lambda text: not text.isascii(),
}


@fault("environment", on=tuple(CHOKES))
def it_raises(on: str) -> type:
    async def episode(self: Any, task: Task, policy: Policy) -> Outcome:
        reply = await policy.chat(task.messages)
        if CHOKES[on](str(reply.message["content"])):
            raise ValueError("this is no answer")
        return Outcome(0.0)

    return type("Chokes", (ToyEnvironment,), {"episode": episode})


@fault("environment", how=("ends_well", "asks_on", "hangs"))
def a_cancellation(how: str) -> type:
    class Swallows(ToyEnvironment):
        async def episode(self, task: Task, policy: Policy) -> Outcome:
            try:
                return await super().episode(task, policy)
            except asyncio.CancelledError:
                if how == "asks_on":
                    await policy.chat(task.messages)
                if how == "hangs":
                    await asyncio.sleep(30)
                return Outcome(0.0)

    return Swallows


LEAKS = {
    "task": lambda: asyncio.create_task(asyncio.sleep(600)),
    "thread": lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(),
    "file": lambda: os.open(os.devnull, os.O_RDONLY),
}


@fault("environment", of=tuple(LEAKS))
def a_leak(of: str) -> type:
    class Leaks(Spoken):
        async def before(self, task: Task) -> Task:
            vars(self).setdefault("held", []).append(LEAKS[of]())
            return task

    return Leaks


@fault("environment")
def the_event_loop_is_blocked() -> type:
    async def before(self: Any, task: Task) -> Task:
        time.sleep(1.0)
        return task

    return type("Blocks", (Spoken,), {"before": before})


@fault("environment")
def it_asks_on_after_the_end() -> type:
    class Insists(ToyEnvironment):
        async def episode(self, task: Task, policy: Policy) -> Outcome:
            for _ in range(500):
                try:
                    await policy.chat(task.messages)
                except ConversationOver:
                    continue
            return Outcome(0.0)

    return Insists


@fault("environment")
def the_policy_never_speaks() -> type:
    async def episode(self: Any, task: Task, policy: Policy) -> Outcome:
        return Outcome(1.0)

    return type("Silent", (ToyEnvironment,), {"episode": episode})


@fault("environment", how=("twice", "early", "for_good", "not"))
def it_closes(how: str) -> type:
    class Closes(Spoken):
        closed = 0

        async def setup(self) -> None:
            self.started = threading.Event()
            if how == "for_good" and self.closed:
                raise RuntimeError("it was closed")
            if how == "not":
                for _ in range(3):
                    threading.Thread(target=self.started.wait, args=(60,), daemon=True).start()

        async def close(self) -> None:
            self.closed += 1
            if how == "twice":
                del self.started
            if how == "early":
                self.started.set()

    return Closes
