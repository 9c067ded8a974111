"""Read tool calls that are written with tags around their parts.

``<function=look><parameter=at>the door</parameter></function>`` is one way of many. The
texts around name, arguments and values are found in the chat template, which renders
examples. A text value stands as it is, and any other one as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coupler.conversation.chat_template import ChatTemplate, Unproved
from coupler.conversation.messages import canonical, parsed
from coupler.conversation.reading import (
    ARGUMENTS,
    NAME,
    TOOL,
    WORD,
    Thinking,
    call,
    calls_text,
)
from coupler.conversation.rendering import Malformed, ReadsCalls
from coupler.errors import CouplerError

FIRST, SECOND = ARGUMENTS
OTHER = "another_example"
VALUES = (ARGUMENTS[FIRST], json.dumps(ARGUMENTS[SECOND], ensure_ascii=False))
NAMES = re.compile(r"[\w.:/-]{1,128}")


def read_calls(
    text: str,
    opens: re.Pattern[str],
    arguments: Callable[[str, int], tuple[dict[str, Any], int | None]],
) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text before the calls, and name and arguments of each call.

    Args:
        opens: what stands before the first name.
        arguments: takes a name and the place behind it. It returns the arguments, and
            the place of the next name, if there is one.

    Raises:
        Malformed: a call has no name.
    """
    began = opens.search(text)
    if not began:
        return text, []
    found: list[tuple[str, Any]] = []
    at: int | None = began.end()

    while at is not None:
        name = NAMES.match(text, at)
        if not name:
            raise Malformed(f"a tool call has no name: {text[at:][:40]!r}")
        given, at = arguments(name.group(), name.end())
        found.append((name.group(), given))
    return text[: began.start()].rstrip("\n"), found


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """The texts around the parts of calls.

    Attributes:
        opens: before the name of the first call.
        first: between a name and its first argument.
        value: between an argument and its value.
        next: between a value and the next argument.
        more: between the last value and the name of the next call. None where a turn
            has one call at most.
        closes: behind the last value of the last call.
        bare_more, bare_closes: the same behind a name without arguments.
    """

    opens: str
    first: str
    value: str
    next: str
    more: str | None
    closes: str
    bare_more: str | None = None
    bare_closes: str | None = None

    @property
    def several(self) -> bool:
        """Return whether a turn may have several calls."""
        return self.more is not None

    def read(
        self,
        text: str,
        tools: Sequence[Any],
    ) -> tuple[str, list[tuple[str, Any]]]:
        """Return the text before the calls, and name and arguments of each call.

        Raises:
            Malformed: something that began as a call cannot be read.
        """

        def arguments(name: str, at: int) -> tuple[dict[str, Any], int | None]:
            given, after = self._arguments(text, at)
            types = _types(name, tools)
            values = {
                key: _typed(
                    value,
                    types.get(key),
                )
                for key, value in given.items()
            }
            return values, after

        return read_calls(text, _around(self.opens), arguments)

    def _arguments(self, text: str, at: int) -> tuple[dict[str, str], int | None]:
        """Return the values behind a name as text, and the place of the next name, if
        there is one.
        """
        given: dict[str, str] = {}
        more, closes = self.bare_more, self.bare_closes
        begins = _around(self.first).match(text, at)

        while begins:
            key = _around(self.value).search(text, begins.end())
            if not key:
                raise Malformed(f"an argument has no value: {text[begins.end() :][:40]!r}")
            more, closes = self.more, self.closes
            ends = [
                _around(each).search(text, key.end())
                for each in (self.next, more, closes)
                if each is not None
            ]
            end = min((m.start() for m in ends if m), default=-1)
            if end < 0:
                raise Malformed("a tool call does not end")
            argument = text[begins.end() : key.start()].strip()
            given[argument] = text[key.end() : end]
            at = end
            begins = _around(self.next).match(text, at)

        if more is not None and (found := _around(more).match(text, at)):
            return given, found.end()
        if closes is None or not _around(closes).fullmatch(text, at):
            raise Malformed(f"the text {text[at:][:40]!r} follows a tool call")
        return given, None


def find_tagged_calls(
    template: ChatTemplate,
    thinking: Thinking | None,
) -> TaggedCalls:
    """Find how the template writes tool calls, and prove it by reading its examples.

    Raises:
        Unproved: it shows no calls, or not with texts around their parts.
        CouplerError: it refuses them.
    """
    one = calls_text(template, [call()], thinking)
    opens, rest = cut(one, NAME)
    first, rest = cut(rest, FIRST)
    value, rest = cut(rest, VALUES[0])
    next_, rest = cut(rest, SECOND)
    again, closes = cut(rest, VALUES[1])
    texts = (opens, first, value, next_)
    if again.strip() != value.strip() or not all(text.strip() for text in (*texts, closes)):
        raise Unproved("it does not write a tool call with texts around its parts")

    more, bare = _between(template, thinking), call(arguments={})
    made = TaggedCalls(*texts, more, closes)
    other = call(1, name=OTHER)
    examples = [[call()], [other], *([[call(), other]] if more else [])]
    bare_closes = _bare(template, [bare], thinking)
    if bare_closes is not None:
        two = _bare(template, [bare, call(1, arguments={})], thinking) if more else None
        bare_more = two and two.partition(NAME)[0]
        made = TaggedCalls(*texts, more, closes, bare_more, bare_closes)
        examples += [[bare], *([[bare, call()], [call(), bare]] if bare_more else [])]
    for calls in examples:
        check(made, calls, calls_text(template, calls, thinking))
    return made


def _between(template: ChatTemplate, thinking: Thinking | None) -> str | None:
    """Return what stands between two calls."""
    try:
        rest = calls_text(template, [call(), call(1)], thinking)
        return cut(cut(rest, VALUES[1])[1], NAME)[0]
    except (CouplerError, Unproved):
        return None


def _bare(
    template: ChatTemplate, calls: Sequence[Mapping[str, Any]], thinking: Thinking | None
) -> str | None:
    """Return what follows the name of a call without arguments."""
    try:
        return cut(calls_text(template, calls, thinking), NAME)[1]
    except (CouplerError, Unproved):
        return None


def check(
    made: ReadsCalls,
    calls: Sequence[Mapping[str, Any]],
    text: str,
) -> None:
    """Read an example of a template.

    Raises:
        Unproved: it is read as something else than these calls.
    """
    try:
        content, read = made.read(text, [TOOL])
    except Malformed as error:
        raise Unproved(f"its own tool call cannot be read: {error}") from None

    wanted = [canonical([c["function"]["name"], c["function"]["arguments"]]) for c in calls]
    if content.strip() or [canonical(one) for one in read] != wanted:
        raise Unproved("its own tool call is read as something else")


def cut(text: str, part: str) -> tuple[str, str]:
    """Divide the text of an example at a part of it.

    Raises:
        Unproved: it does not have the part.
    """
    before, found, after = text.partition(part)
    if not found:
        raise Unproved(f"it does not write {part!r} of a tool call as it is")
    return before, after


def _types(name: str, tools: Sequence[Any]) -> Mapping[str, Any]:
    """Return the types of a tool's arguments, by their schemas."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if function.get("name") == name:
            schemas = (function.get("parameters") or {}).get("properties") or {}
            return {key: _type(each) for key, each in schemas.items()}
    return {}


def _type(schema: Any) -> str:
    """Return "string" for what may be a text, "json" for anything else, or nothing."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if not kinds:
        return ""
    return "string" if "string" in ([kinds] if isinstance(kinds, str) else kinds) else "json"


def _typed(value: str, kind: str | None) -> Any:
    """Return a value of an argument: a text as it is, and anything else as JSON."""
    if kind == "string":
        return value
    found = parsed(value.strip())
    return value if isinstance(found, str) and not kind else found


def _around(text: str) -> re.Pattern[str]:
    """Match ``text`` with any blanks between its words, and its own at the ends."""
    core = r"\s*".join(map(re.escape, WORD.findall(text)))
    start = text[: len(text) - len(text.lstrip())]
    end = text[len(text.rstrip()) :]
    return re.compile(f"(?:{re.escape(start)})?{core}(?:{re.escape(end)})?")
