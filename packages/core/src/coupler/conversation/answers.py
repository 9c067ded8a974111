"""Bring an answer into the form that one chat template takes.

Templates look for reasoning under different names, and some refuse answers which
others take. The form is found by rendering examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any

from coupler.data.templates import MARK, Codec
from coupler.errors import CouplerError

# where templates look for reasoning
KEYS = ("reasoning_content", "thinking")
CALL = {
    "type": "function",
    "id": "example00",
    "function": {"name": MARK, "arguments": {}},
}


class AnswerForm:
    """The form in which a chat template takes an answer."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.refused: dict[str, str] = {}

    def part(self, texts: Iterable[tuple[str, str]]) -> None:
        """Put a blank between two halves of a text from now on, where the template
        refuses an answer that holds both without it.
        """
        for first, second in texts:
            whole = f"{first}{second}"
            if not self._rendered({"content": whole}):
                self.refused[whole] = f"{first} {second}"

    def of(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its reasoning where the template looks for it.

        A template may refuse a text and reasoning beside a tool call. The reasoning is
        left out then.
        """
        if message["role"] != "assistant":
            return message
        made = dict(message)
        reasoning = made.pop(KEYS[0], None)
        both = made["content"] and made.get("tool_calls")

        if reasoning and not (both and self._refuses_both):
            made[self.key] = reasoning
        for key in {"content", self.key} & made.keys():
            for whole, parted in self.refused.items():
                made[key] = made[key].replace(whole, parted)
        return made

    @cached_property
    def key(self) -> str:
        """Return the name under which the template looks for reasoning."""
        for key in KEYS:
            if MARK in self._rendered({"content": "hi", key: MARK}):
                return key
        return KEYS[0]

    @cached_property
    def _refuses_both(self) -> bool:
        asks = {
            "content": "",
            "tool_calls": [CALL],
            self.key: MARK,
        }
        takes_one = self._rendered(asks)
        return bool(takes_one) and not self._rendered({**asks, "content": "hi"})

    def _rendered(self, answer: dict[str, Any]) -> str:
        """Render an answer, or return nothing where the template refuses it."""
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", **answer},
        ]
        with suppress(CouplerError):
            return self.codec.render(messages, generate=False)
        return ""
