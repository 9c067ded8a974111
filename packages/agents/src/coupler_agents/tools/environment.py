"""Let the policy call tools until it says something else, or a limit ends it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from typing import Any

from coupler import (
    CouplerError,
    Environment,
    Message,
    Outcome,
    Policy,
    Reply,
    Task,
    import_target,
)
from coupler.conversation import ConversationOver, Ended
from coupler_agents.mcp.offer import McpTools
from coupler_agents.tools import objects
from coupler_agents.tools.calling import Toolbox
from coupler_agents.tools.config import CallFormat, ToolsConfig
from coupler_agents.tools.python import PythonTool
from coupler_agents.tools.row_kwargs import given_by, offered, python_of
from coupler_agents.tools.schema import schema_of
from coupler_agents.tools.text_calls import as_message, read_calls, with_tools

# methods of a class that the episode calls, and the policy does not
OWN = ("reset", "get_reward", "respond", "release")
ASK_AGAIN = "Your tool call could not be read: {why}."


class ToolEnvironment(Environment):
    """Episodes with functions, with the methods of a class, or with both.

    The class follows TRL's convention. ``reset(**row)`` begins an episode, and may
    return a text that is put behind the prompt. ``get_reward()`` ends it, else
    ``reward.target`` scores the last turn. ``respond(text)`` answers a turn without
    calls, for example as a simulated user. It returns the next message, or None.
    ``release()`` is called at the end, however the episode ended.

    A tool may be a class too, with ``__call__`` in place of other methods. The row's
    ``tools_kwargs`` has the arguments of its ``reset``, ``get_reward`` and ``release``.
    """

    config: ToolsConfig

    def __init__(self, config: ToolsConfig) -> None:
        super().__init__(config)
        found = {tool.__name__: tool for tool in map(_tool, config.functions)}
        self.classes = {name: tool for name, tool in found.items() if isinstance(tool, type)}
        self.functions = {name: tool for name, tool in found.items() if name not in self.classes}
        self.made = _class(config.target) if config.target else None
        self.mcp = McpTools(config.mcp)
        self.python = PythonTool(config) if _has_python(config) else None
        if not found and not self.made and not self.mcp and not self.python:
            raise CouplerError(
                "environment=tools has no tools.\n"
                "  set:  environment.functions, environment.target, environment.builtin or "
                "environment.mcp"
            )

        self.own = self._described()
        self.schemas = list(self.own)
        offers = bool(self.schemas or self.mcp)
        self.uses_tools = offers and config.calls is CallFormat.TEMPLATE

    def _described(self) -> list[dict[str, Any]]:
        """Return the schema of each tool.

        Raises:
            CouplerError: two have one name, or one cannot be described.
        """
        methods = _methods(self.made) if self.made else {}
        sources = {
            "environment.functions": {**self.functions, **self.classes},
            "environment.target": methods,
            "environment.builtin": {"python": self.python.described} if self.python else {},
        }
        seen: dict[str, str] = {}

        for where, tools in sources.items():
            for name in tools:
                if name in seen:
                    raise CouplerError(f"{where} has a tool {name}, and {seen[name]} too.")
                seen[name] = where

        return [_schema(t, where) for where, tools in sources.items() for t in tools.values()]

    async def setup(self) -> None:
        """Start the threads of tools that are no coroutines, and the sandbox, and list
        the tools of MCP servers.

        Raises:
            CouplerError: a server cannot be reached, or two tools have one name.
        """
        await self.mcp.setup()
        self.schemas = [*self.own, *self.mcp.schemas]
        names = [schema["function"]["name"] for schema in self.schemas]
        if twice := {name for name in names if names.count(name) > 1}:
            raise CouplerError(
                f"environment.mcp: two tools have the name {', '.join(sorted(twice))}.\n"
                "  set:  environment.mcp.NAME.tools to those that are meant"
            )

        self.threads = ThreadPoolExecutor(self.config.max_threads, "tool")
        if self.python:
            await self.python.start(self.threads)

    async def close(self) -> None:
        """Leave the threads. A tool that is still running is not waited for."""
        if self.python:
            await self.python.close()
        if hasattr(self, "threads"):
            self.threads.shutdown(wait=False, cancel_futures=True)
        await self.mcp.close()

    async def episode(self, task: Task, policy: Policy) -> Outcome:
        """Play one episode."""
        player: Any = self.made() if self.made else None
        tools = {
            **self.functions,
            **(_methods(player) if player else {}),
        }
        classes = {name: made.__call__ for name, made in self.classes.items()}

        async with AsyncExitStack() as held:
            tools |= await self.mcp.begin(held)
            if self.python:
                programs = self.python.episode(python_of(task.row))
                held.push_async_callback(programs.close)
                tools["python"] = programs.python
            given = given_by(
                task.row,
                {**tools, **classes},
                self.classes,
                builtin=("python",) if self.python else (),
            )
            if hasattr(player, "release"):
                held.push_async_callback(self._own, player.release)
            made = await objects.begin(self.classes, given, self._own, held)
            for name, tool in made.items():
                tools[name] = tool.__call__

            schemas = offered(task.row, self.schemas)
            box = Toolbox(tools, self.config, self.threads, schemas, given)
            messages = await self._begin(task, player, box)
            # A limit ends the episode, and what happened until then has a reward.
            with suppress(ConversationOver):
                await self._talk(messages, policy, box, player)
            rewards = await objects.rewards(made, given, self._own)
            if hasattr(player, "get_reward"):
                rewards[""] = await self._own(player.get_reward)
        return _outcome(box, rewards)

    async def _talk(
        self, messages: list[Message], policy: Policy, box: Toolbox, player: Any
    ) -> None:
        """Let the policy speak until nothing follows.

        Raises:
            ConversationOver: a limit was reached.
        """
        while True:
            reply = await policy.chat(messages, box.schemas if self.uses_tools else ())
            messages.append(reply.message)

            follows = [] if reply.ended else await self._answer(reply, policy, box, player)
            if not follows:
                return
            messages += follows

    async def _begin(self, task: Task, player: Any, box: Toolbox) -> list[Message]:
        messages: list[Message] = list(task.messages)
        if hasattr(player, "reset"):
            said = await self._own(player.reset, **task.row)
            if isinstance(said, str) and said:
                last = messages[-1]
                messages[-1] = {**last, "content": f"{last['content']}{said}"}
        if box.schemas and not self.uses_tools:
            messages = with_tools(messages, box.schemas)
        return messages

    async def _answer(
        self, reply: Reply, policy: Policy, box: Toolbox, player: Any
    ) -> Sequence[Message]:
        """Return the messages that follow a turn. Where there are none, it was the
        last.
        """
        text = reply.message.get("content") or ""
        calls = reply.message.get("tool_calls") or []
        named, malformed = _named(calls), reply.malformed
        if box.schemas and not self.uses_tools:
            named, malformed = read_calls(text)

        if malformed:
            box.counts.errors += 1
            return [{"role": "user", "content": ASK_AGAIN.format(why=malformed)}]
        if named and box.exhausted(len(named)):
            policy.end(Ended.CALLS)
            return []
        if named:
            results = await asyncio.gather(*(box.call(*call) for call in named))
            if self.uses_tools:
                return _as_messages(calls, results)
            return [as_message(results)]
        said = await self._own(player.respond, text) if hasattr(player, "respond") else None
        return [{"role": "user", "content": said}] if said else []

    async def _own(self, method: Callable[..., Any], *args: Any, **row: Any) -> Any:
        """Call a method of the class that is no tool. What it raises is a failure."""
        if inspect.iscoroutinefunction(method):
            return await method(*args, **row)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, lambda: method(*args, **row))


def _named(calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in calls]
    return [(function["name"], function["arguments"]) for function in functions]


def _as_messages(calls: Sequence[Mapping[str, Any]], results: Sequence[str]) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call.get("id", ""), "content": result}
        for call, result in zip(calls, results, strict=True)
    ]


def _outcome(box: Toolbox, rewards: dict[str, Any]) -> Outcome:
    """Return the sum of all rewards, or none. The name of the class's own is empty."""
    metrics = {f"tool_{name}": float(n) for name, n in asdict(box.counts).items()}
    for name, value in rewards.items():
        if name:
            metrics[f"tool_reward_{name}"] = value

    own = [value for value in rewards.values() if value is not None]
    if not own:
        return Outcome(metrics=metrics)
    if len(own) == 1:
        return Outcome(own[0], metrics=metrics)
    return Outcome(sum(own), metrics=metrics)


def _has_python(config: ToolsConfig) -> bool:
    if unknown := sorted(set(config.builtin) - {"python"}):
        raise CouplerError(
            f"environment.builtin: there is no tool {', '.join(unknown)}.\n  there is:  python"
        )
    return "python" in config.builtin


def _schema(tool: Any, where: str) -> dict[str, Any]:
    if isinstance(tool, type):
        return objects.described(tool, where)
    return schema_of(tool, where)


def _tool(target: str) -> Callable[..., Any]:
    found = import_target(target)
    if not inspect.isroutine(found) and not isinstance(found, type):
        raise CouplerError(f"environment.functions: {target} is no function and no class.")
    return found


def _class(target: str) -> type:
    found = import_target(target)
    if not isinstance(found, type):
        raise CouplerError(f"environment.target={target} is no class.")
    return found


def _methods(owner: Any) -> Mapping[str, Callable[..., Any]]:
    """Return the tools of a class, or of an object of it."""
    names = [n for n in dir(owner) if not n.startswith("_") and n not in OWN]
    return {n: m for n in names if inspect.isroutine(m := getattr(owner, n))}
