"""Call tools that a policy named: in bounded time, with errors as text."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from coupler import CouplerError
from coupler_agents.sandbox import SandboxFailed
from coupler_agents.tools.config import ToolsConfig
from coupler_agents.tools.row_kwargs import Given
from coupler_agents.tools.schema import hidden_of

SHOWN = 300  # characters of an error


class ToolLost(CouplerError):
    """The server of a tool went away. That is a failure of the episode."""


class ToolFailed(Exception):
    """Raised by a tool of this package. The policy is told the text as it is."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


@dataclass
class Counts:
    """The counts of an episode's calls."""

    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    truncated: int = 0


@dataclass
class Toolbox:
    """The tools of one episode.

    Attributes:
        schemas: those that the policy is offered.
        given: arguments by tool that the policy does not give: ``tools_kwargs`` of the
            row.
    """

    tools: Mapping[str, Callable[..., Any]]
    config: ToolsConfig
    threads: ThreadPoolExecutor
    schemas: Sequence[Mapping[str, Any]] = ()
    given: Mapping[str, Given] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    def exhausted(self, more: int) -> bool:
        """Return whether ``more`` calls would be above ``environment.max_calls``."""
        return 0 < self.config.max_calls < self.counts.calls + more

    async def call(self, name: str, arguments: Any) -> str:
        """Return what a tool says, or in words why it says nothing.

        Raises:
            ToolLost: its server went away.
            SandboxFailed: the sandbox does not work, which is no fault of the policy.
        """
        self.counts.calls += 1

        try:
            return self._cut(await self._call(name, arguments))
        except (SandboxFailed, ToolLost):
            raise
        except ToolFailed as error:
            self.counts.timeouts += error.timed_out
            self.counts.errors += not error.timed_out
            return self._cut(f"Error: {error}")
        except TimeoutError:
            self.counts.timeouts += 1
            return f"Error: {name} took longer than {self.config.call_timeout_s:g} seconds."
        except Exception as error:  # a tool's own, which the policy is told
            self.counts.errors += 1
            return f"Error: {type(error).__name__}: {error}"[:SHOWN]

    async def _call(self, name: str, arguments: Any) -> Any:
        names = [schema["function"]["name"] for schema in self.schemas]
        if name not in names:
            raise LookupError(f"there is no tool {name!r}. There are: {', '.join(names)}")
        tool = self.tools[name]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            raise TypeError(f"the arguments of {name} are no JSON object")

        hidden = hidden_of(tool)
        given = {**arguments, **self.given.get(name, Given()).execute_kwargs}
        if foreign := hidden & arguments.keys():
            raise TypeError(f"{name} takes no argument {', '.join(sorted(foreign))}")
        inspect.signature(tool).bind(**given)
        # Some wait for a place first, and bound the time of a call themselves.
        bounded = getattr(tool, "bounds_its_time", False)
        async with asyncio.timeout(None if bounded else self.config.call_timeout_s):
            if inspect.iscoroutinefunction(tool):
                return await tool(**given)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.threads, lambda: tool(**given))

    def _cut(self, value: Any) -> str:
        text = value if isinstance(value, str) else _as_text(value)
        limit = self.config.max_result_characters
        if len(text) <= limit:
            return text
        self.counts.truncated += 1
        return f"{text[:limit]} ... ({len(text) - limit} characters more)"


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
