"""Define the options of what scores episodes: a function, a classifier and a judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from coupler.errors import ConfigError
from coupler.interfaces import NO_EFFECT, no_effect
from coupler.system.plain_values import is_of, shown
from coupler.system.words import closest

NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)  # of a function


class Sandbox(StrEnum):
    """When rewards run in a sandbox."""

    AUTO = "auto"
    REQUIRE = "require"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One function of several that make a reward.

    Attributes:
        target: the function, as ``reward.target`` names one.
        weight: what its number is multiplied by.
        args: its own keyword arguments, or those that make a class.
        sources: the kinds of rows, by their column ``data_source``, that it scores.
            None stands for all.
    """

    target: str
    weight: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, given: Any) -> RewardFunction:
        """Read the entry ``name`` of ``reward.functions``.

        Raises:
            ConfigError: it is none. The message names the key.
        """
        key, known = f"reward.functions.{name}", [each.name for each in fields(cls)]
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"reward.functions has a function {name!r}, which cannot name a metric.\n"
                "  try:  letters, digits, _ and -"
            )
        if not isinstance(given, Mapping) or not given.get("target"):
            raise ConfigError(f"{key} names no function.\n  try:  {key}.target=file.py:name")
        if unknown := sorted(map(str, given.keys() - {*known})):
            close = [f"{key}.{each}" for each in closest(unknown[0], known, n=1)]
            meant = f"\n  did you mean:  {close[0]}" if close else ""
            raise ConfigError(
                f"unknown option {key}.{unknown[0]}.{meant}\n"
                f"  options of {key}:  {', '.join(known)}"
            )

        takes = {
            "target": (str, "a text"),
            "weight": (float, "a finite number"),
            "args": (dict, "a mapping {name: value, ...}"),
            "sources": (list[str], "a list [...] of texts"),
        }
        for option, value in given.items():
            kind, words = takes[option]
            if not is_of(kind, value):
                raise ConfigError(f"{key}.{option} takes {words}, got {shown(value)}.")
        sources = tuple(map(str, given.get("sources", ())))
        return cls(given["target"], float(given.get("weight", 1)), given.get("args", {}), sources)

    def scores(self, source: str) -> bool:
        """Tell whether it scores rows of a ``data_source``."""
        return not self.sources or source in self.sources


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
    concurrency: int = no_effect(16, ge=1)
    """Calls of an async reward that one process has under way at the same time."""
    functions: dict[str, Any] = field(default_factory=dict)
    """Several rewards in place of reward.target, by names of your own, which are added
    up: {right: {target: "file.py:name", weight: 1.0, args: {}, sources: [gsm8k]}}. Each
    scores the rows whose data_source is among its sources, all if it names none."""

    @property
    def named(self) -> dict[str, RewardFunction]:
        """Return the functions, by the options that name them.

        Raises:
            ConfigError: ``reward.functions`` is not what it must be.
        """
        if self.functions and self.target:
            raise ConfigError(
                f"reward.target={self.target} and reward.functions are both set.\n"
                "  try:  reward.target='', and its function as reward.functions.NAME.target"
            )

        if self.functions:
            return {
                f"reward.functions.{name}": RewardFunction.of(str(name), given)
                for name, given in self.functions.items()
            }
        return {"reward": RewardFunction(self.target)} if self.target else {}

    @property
    def words(self) -> str:
        """Return the targets as text, empty where there is none."""
        return ", ".join(one.target for one in self.named.values())


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
