"""Let verifiers play an episode, with its client pointed at the gateway."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from coupler import CouplerError, Environment, Outcome, Policy, Task
from coupler.conversation import Conversation
from coupler.errors import DataError
from coupler_agents.gateway import Gateway, Session
from coupler_agents.verifiers.config import VerifiersConfig

COLUMN = "task"
NO_KEY = "COUPLER_NO_KEY"  # requests are told apart by the id of their trace
START_S = 600.0
CLOSE_S = 30.0


class EpisodeError(CouplerError):
    """Verifiers reports that an episode failed."""


class VerifiersEnvironment(Environment):
    """Episodes of an environment of verifiers.

    Verifiers runs the agent, its tools and its rewards. The gateway records the turns
    of the policy, and these are what is trained. A row holds a task of the taskset in
    its column ``task``.
    """

    config: VerifiersConfig

    def __init__(self, config: VerifiersConfig) -> None:
        super().__init__(config)
        self.env = _made(config)
        self.task_type: Any = type(self.env.taskset).task_type()
        self.uses_tools = config.uses_tools
        self.gateway = Gateway()
        self.serving: asyncio.Task[None] | None = None

    async def setup(self) -> None:
        """Start the gateway, and what all episodes of verifiers share.

        Raises:
            Exception: verifiers cannot start what it shares, or takes too long.
        """
        await self.gateway.start()
        self.client = self._client()
        self.places = asyncio.Semaphore(self.config.concurrency)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        self.leave = asyncio.Event()
        self.serving = asyncio.create_task(self._serve(ready))
        done, _ = await asyncio.wait(
            {ready, self.serving},
            timeout=START_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self.serving.done():
            self.serving.result()
        if not done:
            raise CouplerError(
                f"environment=verifiers: what {self.env.taskset.config.id} shares did not start "
                f"within {START_S:.0f} s."
            )

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Hold what verifiers serves. The task that entered it has to leave it."""
        async with self.env.serving():
            ready.set_result(None)
            await self.leave.wait()

    async def close(self) -> None:
        """End what verifiers serves, and the gateway."""
        serving, self.serving = self.serving, None
        if serving:
            self.leave.set()
            await asyncio.wait({serving}, timeout=CLOSE_S)
        await self.gateway.close()

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode. A failure that follows one of its limits is none."""
        conversation = cast(Conversation, policy)

        async with self.places:
            session = self.gateway.open(conversation)
            try:
                played = await self._play(task.row, session)
            finally:
                self.gateway.end(session)

        if session.failure:
            raise session.failure
        if not played.ok and conversation.ended is None:
            raise EpisodeError(_failure(played))
        return _outcome(played)

    async def _play(self, row: Mapping[str, Any], session: Session) -> Any:
        # Verifiers sends the id of a trace with each of its requests.
        return await self.env.run_episode(
            self._task(row),
            _library("verifiers.v1").ModelContext(model="policy", client=self.client),
            on_trace=lambda trace: self.gateway.admit(session, trace.id),
        )

    def _task(self, row: Mapping[str, Any]) -> Any:
        """Return the task that a row holds.

        Raises:
            DataError: it holds none.
        """
        found = row.get(COLUMN)
        if not isinstance(found, Mapping):
            raise DataError(
                f"the row has no task of verifiers in its column {COLUMN}.\n"
                "  write rows:  python -m coupler_agents.verifiers.rows ENV > rows.jsonl"
            )

        try:
            data = self.task_type.data_type().model_validate(dict(found))
        except ValueError as error:
            raise DataError(
                f"the row's {COLUMN} is no task of {self.env.taskset.config.id}: {error}"
            ) from None
        return self.task_type(data, self.env.config.taskset.task)

    def _client(self) -> Any:
        library = _library("verifiers.v1")
        url = f"{self.gateway.url}/v1"
        if not self.config.renderer_model:
            return library.EvalClientConfig(base_url=url, api_key_var=NO_KEY)
        return library.TrainClientConfig(
            base_url=url,
            api_key_var=NO_KEY,
            renderer_model_name=self.config.renderer_model,
        )


def _library(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise CouplerError(
            f"environment=verifiers needs the verifiers library: {error}\n"
            "  install:  pip install 'verifiers>=0.4,<0.5'"
        ) from None


def _made(config: VerifiersConfig) -> Any:
    """Make the environment, whose agents sample at most ``environment.max_turns``
    turns.

    Raises:
        CouplerError: the library is missing, or it refuses the description.
    """
    loaders = _library("verifiers.v1.utils.loaders")

    try:
        resolved = loaders.resolve_env_config(dict(config.env))
        for name, role in resolved:
            if hasattr(role, "max_turns") and role.max_turns is None:
                limited = role.model_copy(update={"max_turns": config.max_turns})
                setattr(
                    resolved,
                    name,
                    limited,
                )
        return loaders.load_environment(resolved)
    except Exception as error:  # it has no class for all of them
        raise CouplerError(
            f"environment.env cannot be made: {type(error).__name__}: {error}\n"
            "  it needs, for example:  {taskset: {id: NAME}, agent: {runtime: {type: docker}}}"
        ) from None


def _outcome(episode: Any) -> Outcome:
    """Return the reward of the agent that is trained, if verifiers gave one.

    Raises:
        CouplerError: several agents are trained.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) > 1:
        raise CouplerError(
            f"the environment trains {len(traces)} agents in an episode, and each would need a "
            "reward of its own.\n  do:  set trainable=False for all but one in its setup()"
        )
    if not traces:
        return Outcome()

    trace = traces[0]
    metrics = {name: value for name, value in trace.metrics.items() if _is_number(value)}
    given = {name: reward for name, reward in trace.rewards.items() if reward is not None}
    for name, reward in given.items():
        metrics[f"reward_{name}"] = reward.score
    whole = bool(given) and len(given) == len(trace.rewards)
    return Outcome(trace.reward if whole else None, metrics=metrics)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _failure(episode: Any) -> str:
    """Return what verifiers says of a failure, with its last traceback."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
        return "verifiers: the episode did not end well, and says not why."
    last = errors[-1]
    return f"verifiers: {last.type}: {last.message}\n{last.traceback or ''}".rstrip()
