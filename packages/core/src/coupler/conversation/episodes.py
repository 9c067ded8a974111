"""Play the episodes of an environment, and count those that failed."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any, Protocol, TypeVar

from coupler.conversation.limits import ConversationOver, Limits
from coupler.conversation.packing import Sample
from coupler.conversation.recorder import Conversation, Generates
from coupler.conversation.rendering import Renderer
from coupler.conversation.tree import Row
from coupler.conversation.workers.link import FailedThere, WorkerDied
from coupler.data import Prompt
from coupler.errors import CouplerError
from coupler.interfaces import (
    Completion,
    Ended,
    Environment,
    EnvironmentConfig,
    Outcome,
    Request,
    Task,
)
from coupler.metrics import Metric, Metrics

# Fewer failures than this never stop a run.
MIN_FAILED = 5
# Seconds that a cancelled episode has to give back what it holds.
END_S = 10.0
T = TypeVar("T")


class EpisodeFailed(CouplerError):
    """An episode failed each time that it was begun."""

    def __init__(self, config: EnvironmentConfig, failure: str) -> None:
        super().__init__(
            f"an episode of environment={config.name} failed each time that it was begun.\n"
            f"  tried:  environment.retries={config.retries}, and so often its group\n"
            f"  its last failure:\n{indent(failure.rstrip(), '    ')}"
        )


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that was played to its end.

    Attributes:
        finish: how it ended, one of :class:`Ended`, or how its only turn did.
    """

    rows: tuple[Row, ...]
    outcome: Outcome
    finish: str
    metrics: Metrics


class Plays(Protocol):
    """Plays the episodes of a run."""

    async def play(self, prompt: Prompt, request: Request) -> Played:
        """Play one episode, with the sampling of ``request``."""
        ...

    async def whole(self, group: Callable[[], Awaitable[list[Sample]]]) -> list[Sample]:
        """Play all episodes of a prompt."""
        ...

    def metrics(self) -> Metrics:
        """Return what is counted over the run."""
        ...


async def together(episodes: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Play the episodes of a group side by side, and return what each gave.

    Where one fails, the others are of no use. They have ended when this raises, so that
    they can be played again. One that takes longer than :data:`END_S` is left behind.
    """
    tasks = [asyncio.create_task(one) for one in episodes]

    try:
        return await asyncio.gather(*tasks)
    finally:
        running = [task for task in tasks if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=END_S)


@dataclass(frozen=True, slots=True)
class OneTurn:
    """Plays episodes of one completion each: those of a run without environment."""

    rollout: Generates
    stop: tuple[int, ...]

    async def play(self, prompt: Prompt, request: Request) -> Played:
        """Sample one completion of the prompt."""
        done = await self.rollout.generate(replace(request, prompt=prompt.ids, stop=self.stop))
        return Played((Row.of_one_turn(prompt.ids, done),), Outcome(), done.finish, {})

    async def whole(self, group: Callable[[], Awaitable[list[Sample]]]) -> list[Sample]:
        """Sample all completions of a prompt."""
        return await group()

    def metrics(self) -> Metrics:
        """Return nothing: completions do not fail."""
        return {}


class Episodes:
    """Plays the episodes of an environment, each in a conversation of its own.

    An episode that raises is begun anew with the same seed, :attr:`EnvironmentConfig.
    retries` times. Then all episodes of its prompt are, as often.

    Args:
        tokens: the longest conversation, prompt and answers together.
    """

    def __init__(
        self,
        environment: Environment,
        config: EnvironmentConfig,
        rollout: Generates,
        renderer: Renderer,
        tokens: int,
    ) -> None:
        self.environment, self.config = environment, config

        self.rollout, self.renderer = rollout, renderer
        self.tokens = tokens
        self.max_failed = config.max_failed_fraction
        self.num_played, self.num_failed = 0, 0
        self.first_failure, self.last_failure = "", ""

    async def whole(self, group: Callable[[], Awaitable[list[Sample]]]) -> list[Sample]:
        """Play all episodes of a prompt, and all of them again where one failed.

        Raises:
            EpisodeFailed: one failed each time.
        """
        for _ in range(self.config.retries):
            with suppress(EpisodeFailed):
                return await group()
        return await group()

    async def play(self, prompt: Prompt, request: Request) -> Played:
        """Play one episode.

        Args:
            request: the sampling of every turn, with the most tokens that one may have.

        Raises:
            EpisodeFailed: it failed each time.
            CouplerError: too many episodes failed, or the rollout did. An environment
                that lets a failure of the rollout pass does not hide it.
        """
        for _ in range(1 + self.config.retries):
            # What an episode changes of its task is not there for the next one.
            row, messages = deepcopy((dict(prompt.row.as_mapping()), prompt.messages))
            task = Task(messages, row, request.seed)
            watched = Watched(self.rollout)
            played = await self._tried(task, request, watched)
            if watched.failure:
                raise watched.failure
            if played:
                return played
        raise EpisodeFailed(self.config, self.last_failure)

    async def _tried(self, task: Task, request: Request, rollout: Watched) -> Played | None:
        """Play an episode once. Where it failed, count that and return None."""
        current = asyncio.current_task()
        assert current

        try:
            return await self._once(task, request, rollout)
        except asyncio.CancelledError as error:
            # A part of the episode may have been cancelled, and not the episode.
            if current.cancelling():
                raise
            self._count(error)
        except (Exception, SystemExit) as error:
            if not rollout.failure:
                self._count(error)
        return None

    async def _once(self, task: Task, request: Request, rollout: Generates) -> Played:
        config = self.config

        limits = Limits(
            request.max_tokens,
            turns=config.max_turns,
            tokens=self.tokens,
            calls=config.max_calls,
            seconds=config.timeout_s,
        )
        conversation = Conversation(rollout, self.renderer, limits, request)
        outcome = await self._in_time(task, conversation)

        rows = conversation.close()
        if not rows and not outcome.invalid:
            raise CouplerError(
                "the episode ended before the policy said anything "
                f"({conversation.ended}: environment.max_tokens={self.tokens}, "
                f"environment.timeout_s={config.timeout_s:g})."
            )
        self.num_played += 1
        found = {f"environment/{name}": Metric(float(n)) for name, n in outcome.metrics.items()}
        assert conversation.ended
        return Played(rows, outcome, conversation.ended, {**conversation.metrics(), **found})

    async def _in_time(self, task: Task, conversation: Conversation) -> Outcome:
        """Return the outcome. Where a limit ended the episode, nothing is known of it
        but what the policy said.
        """
        scope = asyncio.timeout(self.config.timeout_s)

        try:
            async with scope:
                return _checked(await self.environment.episode(task, conversation))
        except ConversationOver:
            return Outcome()
        except TimeoutError:
            if not scope.expired():
                raise
            conversation.end(Ended.SECONDS)
            return Outcome()

    def _count(self, error: BaseException) -> None:
        """Count a failure.

        Raises:
            CouplerError: there are too many.
        """
        if isinstance(error, WorkerDied):
            # All episodes of the process raise this one.
            if error.counted:
                return
            error.counted = True
        self.num_failed += 1
        self.last_failure = _words(error)
        self.first_failure = self.first_failure or self.last_failure

        tries, limit = self.num_played + self.num_failed, self.max_failed
        if self.num_failed >= MIN_FAILED and self.num_failed > limit * tries:
            raise CouplerError(
                f"{self.num_failed} of {tries} episodes of environment={self.config.name} failed.\n"
                f"  limit:  environment.max_failed_fraction={limit}\n"
                f"  the first of them:\n{indent(self.first_failure.rstrip(), '    ')}"
            ) from None

    def metrics(self) -> Metrics:
        """Return how many episodes failed since the run began."""
        return {"environment/failed": Metric(float(self.num_failed), how="max")}


def _words(error: BaseException) -> str:
    """Return the traceback of a failure, where it happened."""
    if isinstance(error, FailedThere | WorkerDied):
        return str(error)
    return "".join(traceback.format_exception(error))


def _checked(outcome: object) -> Outcome:
    """Return what an environment returned.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(outcome, Outcome):
        raise TypeError(f"episode() returned a {type(outcome).__name__}, not an Outcome")
    return outcome


class Watched:
    """Passes requests on, and remembers what failed on the way.

    An environment that raises because the rollout did is no failure of its own.
    """

    def __init__(self, rollout: Generates) -> None:
        self.rollout = rollout
        self.failure: Exception | None = None

    async def generate(self, request: Request) -> Completion:
        """Sample one completion."""
        try:
            return await self.rollout.generate(request)
        except Exception as error:
            self.failure = error
            raise
