"""Define an environment: the part of a run that plays episodes with the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from coupler.interfaces.options import no_effect
from coupler.interfaces.rollout import Completion

# role and content, and tool_calls, tool_call_id and reasoning_content where they apply
Message = Mapping[str, Any]


class Ended(StrEnum):
    """How an episode ended: nothing more was said, a turn was cut at its limit, one of
    the episode was reached, a tool call could not be read, or a side went away.
    """

    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    TOKENS = "tokens"
    SECONDS = "seconds"
    CALLS = "calls"
    PARSE = "parse"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request for a turn.

    Attributes:
        message: the message that the policy sampled.
        finish: how the turn ended: stop, length or abort.
        ended: how the conversation ended, None if it goes on.
        usage: tokens of the prompt and of the completion.
        completion: the sampled ids, with their log-probs and versions.
        malformed: the reason why a tool call in the content could not be read.
    """

    message: Message
    finish: str
    ended: Ended | None
    usage: tuple[int, int]
    completion: Completion
    malformed: str = ""


class Policy(Protocol):
    """The policy, as an episode sees it. Every turn is recorded and trained on."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        max_tokens: int | None = None,
    ) -> Reply:
        """Sample the answer to all messages so far. Tools are OpenAI JSON schemas.

        Raises:
            ConversationOver: the episode has reached one of its limits. An environment
                may let it pass: what was sampled until then counts.
        """
        ...

    async def sample(self, ids: tuple[int, ...], max_tokens: int | None = None) -> Completion:
        """Sample after token ids, for an environment that keeps ids itself."""
        ...

    def end(self, ended: Ended) -> None:
        """Say how the episode ended. The first reason counts."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data, as an episode begins with it.

    Attributes:
        messages: the row's prompt, after ``data.system_prompt`` where there is one.
        row: all columns as plain JSON, ``prompt`` and ``answer`` among them.
        seed: of this episode, for what an environment draws itself.
    """

    messages: tuple[Message, ...]
    row: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode went.

    Attributes:
        reward: None lets ``reward.target`` score ``answer``.
        answer: the text to score. None stands for the text of the last turn.
        invalid: why there is no reward. The episode is then left out and counted.
        metrics: numbers of this episode, whose means are ``environment/NAME``.
        turn_rewards: one for each sampled turn, for algorithms that read
            ``token_reward``. Empty where only the episode has a reward.
    """

    reward: float | None = None
    answer: str | None = None
    invalid: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()


@dataclass
class EnvironmentConfig:
    """The options of every environment."""

    name: str
    max_turns: int = field(default=8, metadata={"ge": 1})
    """The most turns that the policy samples in one episode."""
    max_tokens: int = field(default=0, metadata={"ge": 0})
    """The longest conversation in tokens, prompt and answers together; 0 stands for
    data.max_prompt_tokens and sampling.max_tokens for each of max_turns."""
    max_calls: int = field(default=0, metadata={"ge": 0})
    """The most tool calls of one episode; 0 sets no limit."""
    timeout_s: float = field(default=600.0, metadata={"ge": 0.001})
    """Seconds that one episode may take; what was sampled until then is scored."""
    renderer: str = "auto"
    """What turns messages into ids: template is the chat template, and an installed
    renderer goes by its name. auto takes the template where it is proved exact."""
    keep_reasoning: bool = True
    """Feed the policy its earlier reasoning also where the chat template would drop it
    from the history; else such a turn begins a new row."""
    retries: int = no_effect(2, ge=0)
    """How often an episode that failed begins anew, and how often its group does."""
    max_failed_fraction: float = no_effect(0.01, ge=0, le=1)
    """The run stops above this share of failed episodes, and at least 5 of them."""
    workers: int = no_effect(0, ge=0)
    """Processes that play episodes. With 0, the process of the run does."""
    python: str = no_effect("")
    """The interpreter of workers, if it is another than that of the run."""


class Environment(ABC):
    """Plays episodes, any number of them at once.

    An episode that raises has failed: it begins anew, and never counts as a reward
    of 0. An answer that is wrong is no failure.
    """

    # whether it offers tools through the chat template, which is then proved with them
    uses_tools: bool = False

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config

    async def setup(self) -> None:
        """Start what all episodes share."""
        return None

    @abstractmethod
    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode from its task to its end."""

    async def close(self) -> None:
        """End what :meth:`setup` started."""
        return None
