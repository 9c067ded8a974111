"""Define the options of what scores episodes: a function, a classifier and a judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coupler.interfaces import NO_EFFECT, no_effect


class Sandbox(StrEnum):
    """When rewards run in a sandbox."""

    AUTO = "auto"
    REQUIRE = "require"
    OFF = "off"


@dataclass
class RewardConfig:
    """The function that scores completions, and the processes that run it."""

    target: str = ""
    """The reward function "pkg.mod:name" or "file.py:name"; it takes
    completion, or completions of a prompt, and returns a number, a dict, Graded or
    Invalid, or a list of these."""
    num_workers: int = no_effect(1, ge=1)
    """Processes that score completions."""
    timeout_s: float = no_effect(10.0, ge=0.001)
    """Seconds that one reward call may take; the process of a longer one is killed."""
    max_invalid_fraction: float = no_effect(0.01, ge=0, le=1)
    """The run stops when more than this share of reward calls is invalid, and at least
    5 of them are."""
    sandbox: Sandbox = field(default=Sandbox.AUTO, metadata=NO_EFFECT)
    """"auto" runs a reward that asks for a sandbox in bubblewrap, else behind a filter
    of system calls (seccomp), else refuses it; "require" does so with every reward,
    "off" uses none."""
    max_memory_gib: float = no_effect(0.0, ge=0)
    """Resident memory, in GiB, that one reward process and what it started may have
    together; 0 stands for half of the machine's. Above it they are killed."""
    max_processes: int = no_effect(2000, ge=1)
    """Processes and threads that one reward process may have, itself included; above
    this number they are killed."""


@dataclass
class ScorerModelConfig:
    """The folder of a model that scores episodes."""

    path: str = ""
    """The folder of the model that scores episodes, in Hugging Face layout, or a
    function "pkg.mod:name" or "file.py:name" that returns one; empty has none."""
    trust_remote_code: bool = False
    """Run Python code that the folder of this model brings."""


@dataclass
class RewardModelConfig:
    """A sequence classifier that scores every finished episode."""

    engine: Any = None
    """The backend that computes the score; the policy's if none is chosen."""
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)


@dataclass
class JudgeConfig:
    """A language model that judges every finished episode in words."""

    rollout: Any = None
    """The backend that samples the verdict; that of the run if none is chosen."""
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    prompt: str = ""
    """The text file of the question to the judge, with {completion}, and with {prompt}
    and {answer} where it needs them."""
    pattern: str = r"(?i)score:\s*(-?\d+(?:\.\d+)?)"
    """A regular expression whose first group is the number in a verdict; the last match
    counts. Without reward.target that number is the reward."""
    max_tokens: int = field(default=256, metadata={"ge": 1})
    """The longest verdict, in tokens."""
    temperature: float = field(default=0.0, metadata={"ge": 0})
    """The sampling temperature of the judge; 0 is greedy."""


def opinions_of(reward_model: RewardModelConfig, judge: JudgeConfig) -> tuple[str, ...]:
    """Return the keywords of what models say of an episode."""
    asked = {"score": reward_model.model.path, "verdict": judge.model.path}
    return tuple(name for name, path in asked.items() if path)
