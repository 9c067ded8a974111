"""Define the options of ``environment=gymnasium``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coupler import EnvironmentConfig


@dataclass
class GymnasiumConfig(EnvironmentConfig):
    """Options of an environment that the policy acts in by what it says."""

    name: str = "gymnasium"
    id: str = ""
    """An environment that is registered with gymnasium, for example "FrozenLake-v1". A
    module before it is imported first: "my_module:MyGame-v0"."""
    target: str = field(default="", metadata={"target": True})
    """A class or function "pkg.mod:name" or "file.py:name" that makes an environment
    for each episode, in place of environment.id."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments with which an environment is made. The row's env_kwargs are put over
    them."""
    action_pattern: str = ""
    """A regular expression that finds the action in a turn: its last match counts, and
    of that the first group. Without it the whole turn is the action."""
    actions: list[str] = field(default_factory=list)
    """Names of the actions of a Discrete space, in their order. Without them the policy
    says the number."""
    invalid_reward: float = 0.0
    """The reward of a turn in which there is no action of the space."""
    info_metrics: list[str] = field(default_factory=list)
    """Numbers of the last step's info that are tracked as environment/info_NAME."""
    step_timeout_s: float = field(default=60.0, metadata={"ge": 0.001})
    """Seconds that one step may take. An episode whose step takes longer has failed."""
    max_threads: int = field(default=32, metadata={"ge": 1})
    """Environments are stepped in threads, this many at once."""
