"""Bring chat messages into one form, and compare them.

Clients repeat a history with small changes that mean nothing: other spacing or order in
the JSON of arguments, ``null`` for an empty text, other ids of tool calls. Two messages
that differ in nothing else have the same key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coupler.errors import CouplerError
from coupler.interfaces import Message

SHOWN = 40  # characters of a text in a sentence
MAX_DEPTH = 64  # levels of arguments
CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str)


def tidy(message: Message) -> dict[str, Any]:
    """Return the parts of a message that a chat template reads, in one form.

    The content is a text, arguments of tool calls are parsed JSON where they are JSON,
    and empty parts are left out.

    Raises:
        CouplerError: the message has no role, or holds something else than text.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise CouplerError(f"a message has role={role!r}.\n  set:  role to user, for example")

    found: dict[str, Any] = {"role": role, "content": _text(message.get("content"), role)}
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        found["reasoning_content"] = _text(thought, role)
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def canonical(value: Any) -> str:
    """Return JSON of a value that does not depend on the order of keys."""
    return CANONICAL.encode(value)


def parsed(arguments: Any) -> Any:
    """Return the value of JSON text, and anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if is_flat(value) else arguments


def is_flat(value: Any) -> bool:
    """Return whether JSON nests so little that it can be written again."""
    levels = [value]
    for _ in range(MAX_DEPTH):
        held = [v for v in levels if isinstance(v, dict | list)]
        levels = [inner for v in held for inner in (v.values() if isinstance(v, dict) else v)]
    return not levels


@dataclass(frozen=True, slots=True)
class Said:
    """A message as it is compared: its key, its reasoning, and the tidy message."""

    key: bytes
    reasoning: str
    message: dict[str, Any]

    @classmethod
    def of(cls, message: Message) -> Said:
        """Tidy a message and compute its key.

        The key covers the role, the text, and name and arguments of tool calls. It
        covers neither the ids of tool calls nor the reasoning, which clients drop.
        """
        clean = tidy(message)
        role, text = clean["role"], clean["content"]

        # Most messages have neither calls nor a name. JSON would take the longest here.
        told = f"{len(role)} {role}{text}"
        if "tool_calls" in clean or "name" in clean:
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in _calls(clean)]
            told = canonical([role, text, clean.get("name"), calls])

        key = hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return cls(key, clean.get("reasoning_content", ""), clean)

    def is_plain(self, message: Message) -> bool:
        """Return whether a message has this one's role and text, and no more."""
        return len(self.message) == 2 and message == self.message

    def repeats(self, recorded: Said) -> bool:
        """Return whether this message is the recorded one, with or without its
        reasoning.
        """
        return self.key == recorded.key and self.reasoning in ("", recorded.reasoning)

    def difference(self, recorded: Said) -> str:
        """Say in words what differs first from the recorded message."""
        old, new = recorded.message, self.message
        if old["role"] != new["role"]:
            return f"role {old['role']!r} became {new['role']!r}"
        if self.key == recorded.key:
            return "reasoning " + became(recorded.reasoning, self.reasoning)
        if old["content"] != new["content"]:
            return "content " + became(old["content"], new["content"])
        if len(_calls(old)) != len(_calls(new)):
            return f"{len(_calls(old))} tool calls became {len(_calls(new))}"

        for one, other in zip(_calls(old), _calls(new), strict=True):
            for part in ("name", "arguments"):
                before, after = (canonical(call["function"][part]) for call in (one, other))
                if before != after:
                    return f"{part} of a tool call " + became(before, after)
        return "name " + became(old.get("name", ""), new.get("name", ""))


def differs(told: Sequence[Said], recorded: Sequence[Said]) -> str:
    """Say in words where messages first differ from recorded ones, or nothing."""
    for number, (new, old) in enumerate(zip(told, recorded, strict=False), 1):
        if not new.repeats(old):
            return f"message {number} ({old.message['role']}): {new.difference(old)}"
    return ""


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences share at their starts."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def became(old: str, new: str) -> str:
    """Show the first difference of two texts."""
    start = max(0, shared(old, new) - SHOWN // 2)
    return f"{old[start : start + SHOWN]!r} became {new[start : start + SHOWN]!r}"


def _text(content: Any, role: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""

    parts = content if isinstance(content, list | tuple) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise CouplerError(
                f"the content of a message of role {role!r} has a part of type {kind!r}.\n"
                "  set:  content to a text, or to parts of type 'text'"
            )
    return "".join(part["text"] for part in parts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CouplerError(
            "a tool call names no function.\n"
            "  set:  tool_calls to [{'function': {'name': ..., 'arguments': ...}}]"
        )

    named = {"name": function["name"], "arguments": parsed(function.get("arguments") or {})}
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": named,
    }


def _calls(message: Message) -> list[dict[str, Any]]:
    return message.get("tool_calls", [])
