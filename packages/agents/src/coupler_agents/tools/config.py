"""Define the options of ``environment=tools``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coupler import EnvironmentConfig


class CallFormat(StrEnum):
    """How the policy is shown tools, and calls them."""

    TEMPLATE = "template"  # as the chat template writes tools and calls
    TEXT = "text"  # as JSON in the text, for a template that knows no tools


@dataclass
class ToolsConfig(EnvironmentConfig):
    """Options of tools, and of the class that plays an episode."""

    name: str = "tools"
    functions: list[str] = field(default_factory=list, metadata={"target": True})
    """Tools of every episode: functions "pkg.mod:name" or "file.py:name", described by
    their signature and docstring, or classes with __call__, made anew for each
    episode."""
    target: str = field(default="", metadata={"target": True})
    """A class "pkg.mod:name" or "file.py:name", made anew for each episode. Its public
    methods are tools, but for reset, respond, get_reward and release."""
    mcp: dict[str, Any] = field(default_factory=dict)
    """MCP servers by name, each with a command or a url. A server may also have tools,
    sha256, session, env and start_timeout_s."""
    calls: CallFormat = CallFormat.TEMPLATE
    """The way in which tools are shown and called: as the chat template does, or as
    JSON in plain text, for a template that knows no tools."""
    call_timeout_s: float = field(default=30.0, metadata={"ge": 0.001})
    """Seconds that one call of a tool may take; the policy is told of a longer one."""
    max_result_characters: int = field(default=4000, metadata={"ge": 1})
    """The longest text of a tool that the policy is shown; the rest is cut."""
    max_threads: int = field(default=32, metadata={"ge": 1})
    """Tools that are no coroutines run in threads, this many at once."""
    builtin: list[str] = field(default_factory=list)
    """Tools that come with this package: python runs programs in the sandbox."""
    sandbox_url: str = ""
    """The address of a SandboxFusion server that runs programs, in place of the sandbox
    of this machine. Nothing is kept there between two calls."""
    sandbox_memory_gib: float = field(default=1.0, metadata={"gt": 0})
    """GiB of memory of one episode's programs."""
    sandbox_processes: int = field(default=16, metadata={"ge": 1})
    """Processes and threads of one episode's programs."""
    sandbox_files_mib: int = field(default=64, metadata={"ge": 1})
    """MiB of files of one episode's programs, in /tmp and again in /dev/shm."""
    sandbox_interpreters: int = field(default=256, metadata={"ge": 1})
    """Interpreters that live at once. An episode waits for one at its first program."""
    sandbox_imports: list[str] = field(default_factory=list)
    """Modules that the sandbox imports once, before any program starts."""
