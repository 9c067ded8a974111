"""Show tools in plain text, and read calls out of it, for models without a template for
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
MAX_CHARACTERS = 20_000
INTRODUCTION = (
    "You can call these tools:\n{tools}\n"
    'Call one by writing <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>. '
    "Its result comes in the next message."
)


def with_tools(
    messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages whose system prompt shows the tools."""
    listed = "\n".join(json.dumps(schema["function"]) for schema in schemas)
    shown = INTRODUCTION.format(tools=listed)
    first, *rest = messages

    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{shown}"}, *rest]
    return [{"role": "system", "content": shown}, first, *rest]


def read_calls(text: str) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """Return name and arguments of each call in a text, and why one cannot be read."""
    calls: list[tuple[str, dict[str, Any]]] = []

    for found in CALL.findall(text[:MAX_CHARACTERS]):
        try:
            call = json.loads(found)
        except (ValueError, RecursionError) as error:
            return calls, f"a tool call is no JSON: {error}"
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return calls, "a tool call is no JSON object with a name"
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return calls, "the arguments of a tool call are no JSON object"
        calls.append((call["name"], arguments))
    return calls, ""


def as_message(results: Sequence[str]) -> dict[str, str]:
    """Return the message that shows the results of calls."""
    shown = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return {"role": "user", "content": shown}
