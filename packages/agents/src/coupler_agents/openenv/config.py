"""Define the options of ``environment=openenv``."""

from __future__ import annotations

from dataclasses import dataclass, field

from coupler import EnvironmentConfig


@dataclass
class OpenEnvConfig(EnvironmentConfig):
    """Options of an environment that a server of OpenEnv plays."""

    name: str = "openenv"
    url: str = ""
    """The address of the server, for example "http://localhost:8000"."""
    action_pattern: str = ""
    """A regular expression that finds the action in a turn: its last match counts, and
    of that the first group. Without it the whole turn is the action."""
    action_field: str = ""
    """The field of an action that is what the policy said. Without it the policy says
    the whole action as a JSON object."""
    observation_field: str = ""
    """The field of an observation that the policy is shown. Without it the policy is
    shown all fields as JSON."""
    invalid_reward: float = 0.0
    """The reward of a turn in which there is no action, or one that the server does not
    take."""
    step_timeout_s: float = field(default=60.0, metadata={"ge": 0.001})
    """Seconds that the server may take for one answer. An episode that waits longer has
    failed."""
