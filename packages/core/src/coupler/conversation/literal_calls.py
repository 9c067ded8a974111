"""Read tool calls that are written as a function's call, with values between commas.

``[look(at="the door")]`` is one way, and ``call:look{at:<|"|>the door<|"|>}`` another.
The texts around names and values are found in the chat template, which renders
examples.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coupler.conversation.chat_template import ChatTemplate, Unproved
from coupler.conversation.literals import Literals, expect, skip
from coupler.conversation.messages import is_flat
from coupler.conversation.reading import ARGUMENTS, NAME, Thinking, call, calls_text, loosely
from coupler.conversation.rendering import Malformed
from coupler.conversation.tagged_calls import FIRST, NAMES, OTHER, SECOND, check, cut, read_calls
from coupler.errors import CouplerError

ASSIGNS = re.compile(r"\s*[:=]\s*")


@dataclass(frozen=True, slots=True)
class LiteralCalls:
    """The texts around the parts of calls.

    Attributes:
        opens: before the name of the first call.
        begins: between a name and its arguments, such as ``(``.
        assigns: between an argument and its value, such as ``=``.
        more: between the last value and the name of the next call. None where a turn
            has one call at most.
        closes: behind the last value of the last call.
        quote: around a string, where that is no quotation mark.
    """

    opens: str
    begins: str
    assigns: str
    more: str | None
    closes: str
    quote: str

    @property
    def several(self) -> bool:
        """Return whether a turn may have several calls."""
        return self.more is not None

    def read(self, text: str, tools: Sequence[Any]) -> tuple[str, list[tuple[str, Any]]]:
        """Return the text before the calls, and name and arguments of each call.

        Raises:
            Malformed: something that began as a call cannot be read.
        """

        def arguments(_: str, at: int) -> tuple[dict[str, Any], int | None]:
            try:
                given, after = self._arguments(text, at)
            except (ValueError, RecursionError) as error:
                raise Malformed(f"a tool call cannot be read: {error}") from None
            if not is_flat(given):
                raise Malformed("the arguments of a tool call nest too deeply")
            return given, after

        return read_calls(text, loosely(self.opens), arguments)

    def _arguments(self, text: str, at: int) -> tuple[dict[str, Any], int | None]:
        """Return the arguments behind a name, and the place of the next name, if there
        is one.
        """
        literals, given = Literals(self.quote), dict[str, Any]()
        at = expect(text, at, self.begins)

        while True:
            more = loosely(self.more).match(text, at) if self.more is not None else None
            if more and NAMES.match(text, more.end()):
                return given, more.end()
            if loosely(self.closes).fullmatch(text, at):
                return given, None

            if given:
                at = expect(text, at, ",")
            key, at = literals.key(text, at)
            at = expect(text, at, self.assigns)
            given[key], at = literals.read(text, at)
            at = skip(text, at)


def find_literal_calls(template: ChatTemplate, thinking: Thinking | None) -> LiteralCalls:
    """Find how the template writes tool calls, and prove it by reading its examples.

    Raises:
        Unproved: it shows no calls, or not as a function with values between commas.
        CouplerError: it refuses them.
    """
    made, closes = _one_call(template, thinking)
    more = _between(
        template,
        thinking,
        closes,
    )
    made = replace(made, more=more)
    bare, other = call(arguments={}), call(1, name=OTHER)

    examples = [[call()], [other], [bare]]
    if more is not None:
        examples += [[call(), other], [bare, call(1)], [call(), bare]]
    for calls in examples:
        check(
            made,
            calls,
            calls_text(template, calls, thinking),
        )
    return made


def _one_call(template: ChatTemplate, thinking: Thinking | None) -> tuple[LiteralCalls, str]:
    opens, rest = cut(
        calls_text(
            template,
            [call()],
            thinking,
        ),
        NAME,
    )
    begins, rest = cut(rest, FIRST)
    assigns = ASSIGNS.match(rest)
    if not opens.strip() or not begins.strip() or not assigns:
        raise _unproved()

    string, _, raw = rest[assigns.end() :].partition(ARGUMENTS[FIRST])
    literals = Literals(string if raw else "")
    try:
        _, at = literals.read(rest, assigns.end())
        key, at = literals.key(
            rest,
            expect(
                rest,
                at,
                ",",
            ),
        )
        value, at = literals.read(
            rest,
            expect(
                rest,
                at,
                assigns.group().strip(),
            ),
        )
    except (ValueError, RecursionError):
        raise _unproved() from None
    if (key, value) != (SECOND, ARGUMENTS[SECOND]) or not rest[at:].strip():
        raise _unproved()

    parts = (begins.strip(), assigns.group().strip(), None, rest[at:].strip())
    return LiteralCalls(
        opens.strip(),
        *parts,
        literals.quote,
    ), rest[at:]


def _between(template: ChatTemplate, thinking: Thinking | None, closes: str) -> str | None:
    """Return what stands between two calls."""
    try:
        two = calls_text(
            template,
            [call(arguments={}), call(1, arguments={})],
            thinking,
        )
        _, rest = cut(two, NAME)
        between, _ = cut(rest, NAME)
    except (CouplerError, Unproved):
        return None

    bracket = closes.strip()[:1]
    at = between.find(bracket)
    return between[at:].strip() if at >= 0 else None


def _unproved() -> Unproved:
    return Unproved("it does not write a tool call as a function with values between commas")
