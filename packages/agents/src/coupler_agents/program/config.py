"""Define the options of ``environment=program``."""

from __future__ import annotations

from dataclasses import dataclass, field

from coupler import EnvironmentConfig


@dataclass
class ProgramConfig(EnvironmentConfig):
    """Options of agents that know nothing of Coupler."""

    name: str = "program"
    command: list[str] = field(default_factory=list)
    """A program with its arguments, started for each episode. It reads the row as JSON
    from its standard input, and finds the policy at OPENAI_BASE_URL and
    ANTHROPIC_BASE_URL."""
    target: str = field(default="", metadata={"target": True})
    """An async function "pkg.mod:name" or "file.py:name" of (row, base_url, api_key)
    that returns the reward, or None to let reward.target score the last turn."""
    uses_tools: bool = True
    """Prove the chat template with tools before the run starts; set it to false for an
    agent that offers none, where the template knows no tools."""
    concurrency: int = field(default=64, metadata={"ge": 1})
    """The most programs or functions that run at once."""
