"""Read a value as Python, JSON or a language of a model's own writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
WORDS = re.compile(r"(true|True|false|False|null|None)\b")
VALUES = {"true": True, "false": False, "null": None, "none": None}
KEY = re.compile(r"[^\W\d][\w.-]*")
BLANKS = re.compile(r"\s*")
QUOTED = {
    quote: re.compile(rf"{quote}((?:\\.|[^{quote}\\])*){quote}", re.DOTALL) for quote in "'\""
}
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\n": ""}
ESCAPED |= {quote: quote for quote in "'\"\\"}


class Literals:
    """Reads values of a text.

    Args:
        quote: the text around a string, which has no escapes. Strings in single and
            double quotes have those of Python and JSON.
    """

    def __init__(self, quote: str) -> None:
        own = quote and quote not in QUOTED
        self.raw = re.compile(f"{re.escape(quote)}(.*?){re.escape(quote)}", re.DOTALL)
        self.quote = quote if own else ""

    def read(self, text: str, at: int) -> tuple[Any, int]:
        """Return the value at a place, and the place behind it.

        Raises:
            ValueError: no value stands there.
            RecursionError: it nests too deeply.
        """
        at = skip(text, at)
        if (string := self._string(text, at)) is not None:
            return string

        if text.startswith("[", at):
            return self._items(
                text,
                at + 1,
                "]",
                self._element,
                list,
            )
        if text.startswith("{", at):
            return self._items(
                text,
                at + 1,
                "}",
                self._pair,
                dict,
            )
        if word := WORDS.match(text, at):
            return VALUES[word.group().lower()], word.end()
        if number := NUMBER.match(text, at):
            return json.loads(number.group()), number.end()
        raise ValueError(f"no value: {text[at:][:40]!r}")

    def key(self, text: str, at: int) -> tuple[str, int]:
        """Return the key at a place, and the place behind it.

        Raises:
            ValueError: no key stands there.
        """
        at = skip(text, at)
        if (string := self._string(text, at)) is not None:
            return string
        if bare := KEY.match(text, at):
            return bare.group(), bare.end()
        raise ValueError(f"no name of an argument: {text[at:][:40]!r}")

    def _string(self, text: str, at: int) -> tuple[str, int] | None:
        if self.quote and (found := self.raw.match(text, at)):
            return found.group(1), found.end()
        pattern = QUOTED.get(text[at : at + 1])
        found = pattern.match(text, at) if pattern else None
        return (_unescaped(found.group(1)), found.end()) if found else None

    def _items(
        self,
        text: str,
        at: int,
        closes: str,
        item: Callable[[str, int], tuple[Any, int]],
        made: Callable[[list[Any]], Any],
    ) -> tuple[Any, int]:
        """Read what stands between brackets, with commas between."""
        found: list[Any] = []

        while True:
            at = skip(text, at)
            if text.startswith(closes, at):
                return made(found), at + 1
            if found:
                at = expect(
                    text,
                    at,
                    ",",
                )
                at = skip(text, at)
                if text.startswith(closes, at):  # behind the last comma
                    continue
            one, at = item(text, at)
            found.append(one)

    def _element(self, text: str, at: int) -> tuple[Any, int]:
        return self.read(text, at)

    def _pair(self, text: str, at: int) -> tuple[tuple[str, Any], int]:
        key, at = self.key(text, at)
        value, at = self.read(
            text,
            expect(
                text,
                at,
                ":",
            ),
        )
        return (key, value), at


def skip(text: str, at: int) -> int:
    """Return the place behind blanks."""
    found = BLANKS.match(text, at)
    return found.end() if found else at


def expect(text: str, at: int, part: str) -> int:
    """Return the place behind a part that must stand here.

    Raises:
        ValueError: something else stands here.
    """
    at = skip(text, at)
    if not text.startswith(part, at):
        raise ValueError(f"{part!r} is missing before {text[at:][:40]!r}")
    return at + len(part)


def _unescaped(text: str) -> str:
    """Replace escapes. What is none stays as it is."""

    def one(found: re.Match[str]) -> str:
        code = found.group(1)
        if len(code) > 1:
            return chr(int(code[1:], 16))
        return ESCAPED.get(code, found.group())

    plain = ESCAPE.sub(one, text)
    # two halves of a character are one, and half of one is none
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
