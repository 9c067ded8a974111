"""Describe MCP servers: how a run names them, and which tools they have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coupler import CouplerError
from coupler.errors import ConfigError

SECTION = "environment.mcp"
SESSIONS = ("episode", "run")
Schema = Mapping[str, Any]


class ToolsChanged(CouplerError):
    """A server has other tools than those that were pinned."""


@dataclass(frozen=True, slots=True)
class Server:
    """One entry of ``environment.mcp``.

    Attributes:
        command: a program with its arguments that speaks MCP over its standard streams.
        url: the address of a server that speaks streamable HTTP, in place of a command.
        env: variables for the program, beside PATH, HOME and a few more.
        tools: the tools that the policy is shown, all if it is empty.
        sha256: the hash of these tools, as the log shows it. Other tools are refused.
        session: "episode" for a session of its own for each episode, "run" for one.
        start_timeout_s: seconds until the server must have told its tools.
    """

    name: str
    command: Sequence[str] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[str] = ()
    sha256: str = ""
    session: str = "episode"
    start_timeout_s: float = 60.0

    @property
    def key(self) -> str:
        """Return the option that names the server."""
        return f"{SECTION}.{self.name}"


def read_servers(entries: Mapping[str, Any]) -> list[Server]:
    """Read the entries of ``environment.mcp``.

    Raises:
        ConfigError: one has an unknown key or a wrong value.
    """
    return [_server(name, entry) for name, entry in entries.items()]


def _server(name: str, entry: Any) -> Server:
    key = f"{SECTION}.{name}"

    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key} is no mapping.\n  its keys:  {', '.join(TAKES)}")
    if unknown := [str(each) for each in entry if each not in TAKES]:
        raise ConfigError(f"unknown option {key}.{unknown[0]}.\n  its keys:  {', '.join(TAKES)}")
    if bool(entry.get("command")) == bool(entry.get("url")):
        raise ConfigError(
            f"{key} needs one way to its server.\n"
            f"  set:  {key}.command=[PROGRAM,ARGUMENT] or {key}.url=http://HOST/mcp"
        )

    for each, value in entry.items():
        wanted, fits = TAKES[each]
        if not fits(value):
            raise ConfigError(f"{key}.{each} takes {wanted}, got {value!r:.80}.")
    return Server(name=name, **entry)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _is_env(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


TAKES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "command": ("a list of texts", _is_texts),
    "url": ("a text", _is_text),
    "env": ("a mapping of texts", _is_env),
    "tools": ("a list of texts", _is_texts),
    "sha256": ("a text", _is_text),
    "session": ("episode or run", SESSIONS.__contains__),
    "start_timeout_s": ("seconds above 0", _is_seconds),
}


def chosen(server: Server, schemas: Sequence[Schema]) -> list[Schema]:
    """Return those tools of a server that the policy is shown, by name.

    Raises:
        CouplerError: there are none, or one that the run names is not there.
    """
    by_name = _by_name(schemas)
    names = server.tools or sorted(by_name)
    missing = [name for name in names if name not in by_name]

    if missing or not names:
        what = f"no tool {', '.join(missing)}" if missing else "no tools"
        raise CouplerError(
            f"the server of {server.key} has {what}.\n  it has:  {', '.join(by_name) or 'none'}"
        )
    return [by_name[name] for name in sorted(names)]


def _by_name(schemas: Sequence[Schema]) -> dict[str, Schema]:
    return {schema["function"]["name"]: schema for schema in schemas}


def hash_of(schemas: Sequence[Schema]) -> str:
    """Return the SHA-256 of what the policy is shown: names, descriptions, schemas."""
    text = json.dumps(list(schemas), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_pin(server: Server, schemas: Sequence[Schema]) -> None:
    """Compare tools with ``sha256``, where a run sets it.

    Raises:
        ToolsChanged: they have another hash.
    """
    found = hash_of(schemas)
    if server.sha256 and server.sha256.lower() != found:
        raise ToolsChanged(
            f"the tools of {server.key} are not those that {server.key}.sha256 pins.\n"
            f"  it pins:  {server.sha256}\n  they are:  {found}\n"
            "  do:  read what changed, and then set the new hash"
        )


def check_same(server: Server, before: Sequence[Schema], now: Sequence[Schema]) -> None:
    """Compare tools with those at the start of the run.

    Raises:
        ToolsChanged: one was added, removed or altered.
    """
    if hash_of(before) == hash_of(now):
        return

    old, new = _by_name(before), _by_name(now)
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    raise ToolsChanged(
        f"the tools of {server.key} changed during the run: {', '.join(names)}.\n"
        f"  do:  end what changes the server, or name its tools in {server.key}.tools"
    )
