"""Spread reward calls over worker processes.

A call that hangs costs its process and never the run.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coupler.errors import ConfigError, CouplerError, DataError
from coupler.metrics import Metrics
from coupler.rewards import sandbox
from coupler.rewards.answers import read_answer
from coupler.rewards.process import START_S, Calling, Limits, Mode, WorkerDied, WorkerProcess
from coupler.rewards.result import Invalid, Scored
from coupler.rewards.tally import Tally
from coupler.rewards.value import judged
from coupler.system.log import get_logger

log = get_logger(__name__)

# Calls go to a worker in messages of about this much work, at most MESSAGE_CALLS.
MESSAGE_S = 0.005
MESSAGE_CALLS = 64
# An async call ends by itself when its time is up, unless it blocks its loop.
BLOCKED_S = 5.0


@dataclass(slots=True)
class _Call:
    # The call as JSON, and how many completions it has.
    request: str
    size: int
    future: asyncio.Future[list[Scored]]
    # A process died while it had this call and had answered others.
    retried: bool = False
    # It came with others when the process was lost, which may be the fault of any.
    alone: bool = False

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
        *,
        key: str = "reward.target",
        args: Mapping[str, Any] | None = None,
        concurrency: int = 16,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ConfigError(
                f"reward.num_workers={num_workers} and reward.timeout_s={timeout_s} must be "
                "positive."
            )

        self.target = target
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.tally = Tally(target or "the environment", f"{key}={target}", max_invalid_fraction)
        self.calling, self.concurrency = Calling(key, args or {}, timeout_s), concurrency
        self.limits = limits or Limits()
        # columns of every row that models add: score, verdict
        self.opinions = tuple(opinions)
        # What its function is, once it has started.
        self.facts: Mapping[str, Any] = {}
        self._mode = Mode.OFF if self.limits.sandbox == "off" else Mode.ASK

        self._waiting: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._stopped: CouplerError | None = None
        self._threads: list[threading.Thread] = []
        self._started: list[threading.Event] = []
        self._processes: set[WorkerProcess] = set()

    def begin(self) -> None:
        """Start the processes, and return while each imports the reward.

        Raises:
            ConfigError: ``reward.sandbox=require`` finds no sandbox.
        """
        if not self.target or self._threads:
            return
        if self.limits.sandbox == "require":
            self._mode = _sandbox("reward.sandbox=require: every reward must run in a sandbox")

        self._started = [threading.Event() for _ in range(self.num_workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(s,), daemon=True) for s in self._started
        ]
        for thread in self._threads:
            thread.start()

    def start(self) -> None:
        """Start the processes, and wait until each has imported the reward.

        Raises:
            CouplerError: the reward cannot be imported, or its signature does not fit,
                or ``reward.sandbox=require`` finds no sandbox.
        """
        self.begin()

        for event in self._started:
            event.wait(START_S + 10)
        if self._stopped:
            self.close()
            raise self._stopped
        if said := self.facts.get("said"):
            log.info(f"{self.calling.key}={self.target} {said}")

    @property
    def takes_group(self) -> bool:
        """Return whether its function takes all completions of a prompt at once."""
        return bool(self.facts.get("group"))

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse rows without a column that the function cannot do without.

        Args:
            columns: those that some row has.

        Raises:
            ConfigError: there is one. The message names the function and the column.
        """

        for name in self.facts.get("columns", ()):
            if name not in columns:
                raise ConfigError(
                    f"{self.calling.key}={self.target} takes the column {name}, which no row has.\n"
                    f"  it has:  {', '.join(sorted(columns))}\n"
                    f"  try:  data.columns.{name}=COLUMN, or a default value in the function"
                )

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
        scored = await self.ask(completions, answer, row)
        for one in scored:
            self.count(one)
        return scored

    async def call(self, completion: str, answer: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion without counting it, and never stop the run."""
        if not self.target:
            return judged(None, "the environment gave no reward, and reward.target is empty")
        return (await self.ask([completion], answer, row))[0]

    async def ask(
        self, completions: Sequence[str], answer: str, row: Mapping[str, Any]
    ) -> list[Scored]:
        """Score completions by one call without counting it.

        There is one completion, unless the function takes a group.
        """
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
        return self.tally.metrics()

    def close(self) -> None:
        """Kill every process. Calls under way fail."""
        self._stop(CouplerError("the reward pool is closed."))
        for thread in self._threads:
            thread.join(10)

    def count(self, scored: Scored) -> None:
        """Count a result, as :meth:`Tally.count` does. :meth:`score` does so itself."""
        self.tally.count(scored)

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
            while calls := self._take(self._room(process, slowest)):
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

    def _room(self, process: WorkerProcess, slowest: float) -> int:
        """Return the most calls of one message."""
        if process.facts["batch"]:
            return MESSAGE_CALLS
        if process.facts["async"]:
            return self.concurrency
        return max(1, min(MESSAGE_CALLS, int(MESSAGE_S / slowest)))

    def _spawn(self) -> WorkerProcess:
        mode = self._mode
        process = WorkerProcess(self.target, self.limits, mode, self.opinions, self.calling)
        with self._changed:
            self._processes.add(process)
            if self._stopped:
                process.terminate()

        wants_sandbox = process.wait_ready(self.target)
        if mode is Mode.ASK and wants_sandbox:
            self._seek_sandbox()
            return self._replace(process)
        self.facts = process.facts
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
                if self._waiting and self._waiting[0].alone:
                    share = 1
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
        slowest, together = 0.0, process.facts["async"] or process.facts["batch"]
        patience = self.timeout_s + (BLOCKED_S if process.facts["async"] else 0)

        try:
            process.send(f"[{','.join(c.request for c in calls)}]\n".encode(), self.timeout_s)
            while unanswered:
                lines = process.receive(patience)
                if len(lines) > len(unanswered):
                    raise WorkerDied("gave more answers than it had calls")
                sizes = [call.size for call in unanswered]
                found = [read_answer(*pair, self._late) for pair in zip(lines, sizes, strict=False)]
                _settle([(unanswered.popleft(), scored) for scored in found])
                slowest = max(slowest, *(scored[0].seconds for scored in found))

        except TimeoutError:
            slowest = self.timeout_s
            process.kill(dump_stacks=True)
            if together and len(unanswered) > 1:
                _part(unanswered)
            else:
                self._blame(unanswered.popleft(), process, self._late, timed_out=True)

        except WorkerDied as died:
            answered = process.answered
            process.kill()
            # Something that an earlier call began may have ended the process.
            if together and len(unanswered) > 1:
                _part(unanswered)
            elif answered and not died.blame and not unanswered[0].retried:
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

    @property
    def _late(self) -> str:
        return f"took longer than {self.timeout_s:g} s"

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


def _part(calls: Iterable[_Call]) -> None:
    """Let each of some calls that went together have the next process for itself."""
    for call in calls:
        call.alone = True


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
