"""Spread reward calls over worker processes.

A call that hangs costs its process and never the run.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from coupler.errors import ConfigError, CouplerError, DataError, RewardError
from coupler.metrics import Metric, Metrics
from coupler.rewards import sandbox
from coupler.rewards.answers import read_answer
from coupler.rewards.process import START_S, Limits, Mode, WorkerDied, WorkerProcess
from coupler.rewards.result import Invalid, Scored
from coupler.rewards.value import judged

# Fewer invalid calls than this never stop a run.
MIN_INVALID = 5
# The last calls are judged on their own, so that a reward that breaks late cannot hide
# behind the valid calls before.
RECENT = 64
# Calls go to a worker in messages of about this much work, at most MESSAGE_CALLS.
MESSAGE_S = 0.005
MESSAGE_CALLS = 64


@dataclass(slots=True)
class _Call:
    # The call as JSON, and how many completions it has.
    request: str
    size: int
    future: asyncio.Future[list[Scored]]
    # A process died while it had this call and had answered others.
    retried: bool = False

    def settle(self, result: list[Scored] | CouplerError) -> None:
        """Set the result. Runs in the thread of the event loop."""
        # The task that waits may have been cancelled.
        if self.future.done():
            return
        if isinstance(result, list):
            self.future.set_result(result)
        else:
            self.future.set_exception(result)


class RewardPool:
    """Call ``target`` in ``num_workers`` processes.

    Each process has a thread here. The thread takes calls from one queue, sends a few
    at a time, and hands out their results in order. A call is ``Invalid`` if it has no
    answer after ``timeout_s`` seconds or if its process died. The process is then
    replaced, and the calls behind that call go to the front of the queue. Where the
    process died after it answered others, the call has a second try in another one.

    Example:
        ``pool = RewardPool("rewards.py:score", 2, 10.0, 0.01); pool.start(); await
        pool.score(text, "42", row)``
    """

    def __init__(
        self,
        target: str,
        num_workers: int,
        timeout_s: float,
        max_invalid_fraction: float,
        limits: Limits | None = None,
        opinions: Sequence[str] = (),
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ConfigError(
                f"reward.num_workers={num_workers} and reward.timeout_s={timeout_s} must be "
                "positive."
            )

        self.target = target
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.max_invalid_fraction = max_invalid_fraction
        self.limits = limits or Limits()
        # columns of every row that models add: score, verdict
        self.opinions = tuple(opinions)
        # its function takes all completions of a prompt at once
        self.takes_group = False
        self._mode = Mode.OFF if self.limits.sandbox == "off" else Mode.ASK

        self.reasons: Counter[str] = Counter()
        self.first_detail = ""
        self._num_calls = 0
        # The names of the parts of rewards, once there is one.
        self._parts: list[str] | None = None
        # One entry for each of the last calls: True if it was invalid.
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._step: list[Scored] = []

        self._waiting: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._stopped: CouplerError | None = None
        self._threads: list[threading.Thread] = []
        self._processes: set[WorkerProcess] = set()

    def start(self) -> None:
        """Start the processes and import the reward in each.

        Raises:
            CouplerError: the reward cannot be imported, or its signature does not fit,
                or ``reward.sandbox=require`` finds no sandbox.
        """
        if not self.target:
            return
        if self.limits.sandbox == "require":
            self._mode = _sandbox("reward.sandbox=require: every reward must run in a sandbox")

        started = [threading.Event() for _ in range(self.num_workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(s,), daemon=True) for s in started
        ]
        for thread in self._threads:
            thread.start()

        for event in started:
            event.wait(START_S + 10)
        if self._stopped:
            self.close()
            raise self._stopped

    async def score(self, completion: str, answer: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion.

        ``row`` must be valid as JSON. Its ``prompt`` is passed by that keyword, too.

        Raises:
            RewardError: too many calls were invalid. These are at least 5, and either
                more than ``max_invalid_fraction`` of all or most of the last 64.
            CouplerError: the pool is closed, or the reward could not be imported again
                after a process was killed.
        """
        scored = await self.call(completion, answer, row)
        self.count(scored)
        return scored

    async def score_group(
        self, completions: Sequence[str], answer: str, row: Mapping[str, Any]
    ) -> list[Scored]:
        """Score all completions of a prompt at once, by a function that takes them.

        See :attr:`takes_group` and :meth:`score`.
        """
        if not completions:
            return []
        scored = await self._ask(completions, answer, row)
        for one in scored:
            self.count(one)
        return scored

    async def call(self, completion: str, answer: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion without counting it, and never stop the run."""
        if not self.target:
            return judged(None, "the environment gave no reward, and reward.target is empty")
        return (await self._ask([completion], answer, row))[0]

    async def _ask(
        self, completions: Sequence[str], answer: str, row: Mapping[str, Any]
    ) -> list[Scored]:
        try:
            request = json.dumps([list(completions), answer, row])
        except TypeError as error:
            raise DataError(f"a row cannot be sent to the reward as JSON: {error}.") from None
        call = _Call(request, len(completions), asyncio.get_running_loop().create_future())

        with self._changed:
            if self._stopped:
                raise self._stopped
            self._waiting.append(call)
            self._changed.notify()
        return await call.future

    def metrics(self) -> Metrics:
        """Return rates and the longest call (seconds) since the last call of this."""
        step, self._step = self._step, []

        return {
            "reward/invalid_rate": Metric(
                sum(isinstance(s.result, Invalid) for s in step), len(step)
            ),
            "reward/timeout_rate": Metric(sum(s.timed_out for s in step), len(step)),
            "time/reward_max": Metric(max((s.seconds for s in step), default=0.0), how="max"),
        }

    def close(self) -> None:
        """Kill every process. Calls under way fail."""
        self._stop(CouplerError("the reward pool is closed."))
        for thread in self._threads:
            thread.join(10)

    def count(self, scored: Scored) -> None:
        """Count a result. :meth:`score` does so itself.

        Raises:
            RewardError: too many were invalid, as :meth:`score` says, or this one has
                other parts than those before.
        """
        self._check_parts(scored)
        self._step.append(scored)
        self._num_calls += 1
        self._recent.append(isinstance(scored.result, Invalid))
        if isinstance(scored.result, Invalid):
            self.reasons[scored.result.reason] += 1
            self.first_detail = self.first_detail or scored.detail

        count, limit = self.reasons.total(), self.max_invalid_fraction
        burst = len(self._recent) == RECENT and sum(self._recent) > max(0.5, limit) * RECENT
        if count >= MIN_INVALID and (count > limit * self._num_calls or burst):
            raise RewardError(self._complaint())

    def _check_parts(self, scored: Scored) -> None:
        if isinstance(scored.result, Invalid):
            return

        names = sorted(scored.parts)
        if self._parts is None:
            self._parts = names
        if names != self._parts:
            now, before = (", ".join(each) or "none" for each in (names, self._parts))
            raise RewardError(
                f"a reward has other parts than those before: {now} and not {before}.\n"
                f"  look at:  reward.target={self.target}, which gives the same parts each time"
            )

    def _complaint(self) -> str:
        recent = f"{sum(self._recent)} of the last {len(self._recent)}"
        lines = [
            (
                f"{self.reasons.total()} of {self._num_calls} calls of "
                f"{self.target or 'the environment'} gave no valid number ({recent})."
            ),
            f"  limit:   reward.max_invalid_fraction={self.max_invalid_fraction}",
            *(f"  reason:  {count} x {reason}" for reason, count in self.reasons.most_common(5)),
        ]

        if self.first_detail:
            lines += ["  the first of them:", indent(self.first_detail.rstrip(), "    ")]
        return "\n".join(lines)

    def _stop(self, problem: CouplerError) -> None:
        """Fail every waiting and every future call, and kill the processes.

        The threads of the processes then end.
        """
        with self._changed:
            self._stopped = self._stopped or problem
            self._fail_waiting()
            for process in self._processes:
                process.terminate()
            self._changed.notify_all()

    def _fail_waiting(self) -> None:
        assert self._stopped
        _settle([(call, self._stopped) for call in self._waiting])
        self._waiting.clear()

    # The methods below run in the threads, one for each process.

    def _serve(self, started: threading.Event) -> None:
        process = None
        # The seconds of the slowest call of late: a maximum that decays.
        slowest = MESSAGE_S

        try:
            process = self._spawn()
            started.set()
            while calls := self._take(max(1, min(MESSAGE_CALLS, int(MESSAGE_S / slowest)))):
                if not process.alive():
                    process = self._replace(process)
                slowest = max(self._exchange(process, calls), slowest * 0.9 ** len(calls))
        # An error in this thread reaches nobody unless every waiting call raises it.
        except BaseException as error:
            problem = (
                error
                if isinstance(error, CouplerError)
                else CouplerError(f"the reward pool failed: {error!r}")
            )
            self._stop(problem)
            started.set()
        finally:
            if process:
                process.kill()

    def _spawn(self) -> WorkerProcess:
        mode = self._mode
        process = WorkerProcess(self.target, self.limits, mode, self.opinions)
        with self._changed:
            self._processes.add(process)
            if self._stopped:
                process.terminate()

        wants_sandbox = process.wait_ready(self.target)
        self.takes_group = process.takes_group
        if mode is Mode.ASK and wants_sandbox:
            self._seek_sandbox()
            return self._replace(process)
        return process

    def _seek_sandbox(self) -> None:
        """Decide once where a reward runs that asks for the sandbox.

        Raises:
            ConfigError: there is none here.
        """
        with self._changed:
            if self._mode is not Mode.ASK:
                return
            self._mode = _sandbox(f"reward.target={self.target} must run in a sandbox")

    def _replace(self, process: WorkerProcess) -> WorkerProcess:
        process.kill()
        with self._changed:
            self._processes.discard(process)
        return self._spawn()

    def _take(self, at_most: int) -> list[_Call]:
        """Wait for calls, and take this worker's share of them.

        Returns nothing when the pool stops.
        """
        with self._changed:
            while not self._stopped:
                share = min(at_most, -(-len(self._waiting) // self.num_workers))
                calls = [self._waiting.popleft() for _ in range(share)]
                calls = [c for c in calls if not c.future.cancelled()]
                if calls:
                    return calls
                self._changed.wait_for(lambda: self._waiting or self._stopped)
            return []

    def _exchange(self, process: WorkerProcess, calls: list[_Call]) -> float:
        """Have ``calls`` answered, and return the seconds of the slowest.

        Calls behind one that costs the process go back into the queue.
        """
        unanswered = deque(calls)
        slowest = 0.0

        try:
            process.send(f"[{','.join(c.request for c in calls)}]\n".encode(), self.timeout_s)
            while unanswered:
                lines = process.receive(self.timeout_s)
                if len(lines) > len(unanswered):
                    raise WorkerDied("gave more answers than it had calls")
                sizes = [call.size for call in unanswered]
                found = [read_answer(*pair) for pair in zip(lines, sizes, strict=False)]
                _settle([(unanswered.popleft(), scored) for scored in found])
                slowest = max(slowest, *(scored[0].seconds for scored in found))

        except TimeoutError:
            slowest = self.timeout_s
            process.kill(dump_stacks=True)
            self._blame(
                unanswered.popleft(),
                process,
                f"took longer than {self.timeout_s:g} s",
                timed_out=True,
            )

        except WorkerDied as died:
            answered = process.answered
            process.kill()
            # Something that an earlier call began may have ended the process.
            if answered and not died.blame and not unanswered[0].retried:
                unanswered[0].retried = True
            else:
                self._blame(unanswered.popleft(), process, f"its process {died}")

        finally:
            with self._changed:
                self._waiting.extendleft(reversed(unanswered))
                if self._stopped:
                    self._fail_waiting()
                self._changed.notify_all()
        return slowest

    def _blame(
        self, call: _Call, process: WorkerProcess, reason: str, *, timed_out: bool = False
    ) -> None:
        blamed = Scored(
            result=Invalid(reason),
            seconds=self.timeout_s if timed_out else 0.0,
            detail="\n".join(process.tail),
            timed_out=timed_out,
        )
        _settle([(call, self._stopped or [blamed] * call.size)])


def _sandbox(why: str) -> Mode:
    """Return the mode of a worker in the sandbox of this machine.

    Raises:
        ConfigError: there is none. The text opens with ``why`` it is needed.
    """
    if kind := sandbox.kind():
        return Mode(kind)
    raise ConfigError(
        f"{why}, and there is none here ({sandbox.why_none()}).\n  try:  {sandbox.FIX}, or "
        "reward.sandbox=off at your own risk"
    )


def _settle(results: Sequence[tuple[_Call, list[Scored] | CouplerError]]) -> None:
    """Hand results to the event loops that wait for them, and wake each loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Call, list[Scored] | CouplerError]]] = {}
    for call, result in results:
        by_loop.setdefault(call.future.get_loop(), []).append((call, result))

    for loop, pairs in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(
                lambda pairs=pairs: [call.settle(result) for call, result in pairs]
            )


def check_reward(
    target: str,
    samples: Iterable[tuple[str, str, Mapping[str, Any]]],
    timeout_s: float,
    limits: Limits | None = None,
    opinions: Sequence[str] = (),
) -> list[Scored]:
    """Score (completion, answer, row) ``samples`` in one worker process.

    Use it to try a reward out before a run. It works with and without a running event
    loop, and blocks the loop.

    Raises:
        CouplerError: the reward cannot be imported, or its signature does not fit.
    """

    async def score_all() -> list[Scored]:
        return [await pool.call(*sample) for sample in samples]

    pool = RewardPool(target, 1, timeout_s, 1.0, limits, opinions)
    pool.start()

    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, score_all()).result()
    finally:
        pool.close()
