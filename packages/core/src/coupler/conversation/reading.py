"""Read reasoning and tool calls out of sampled text.

The way in which a model writes them is found in its chat template, which renders an
example of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coupler.conversation.chat_template import ChatTemplate, Unproved
from coupler.conversation.messages import canonical, is_flat, parsed, shared
from coupler.conversation.rendering import Malformed
from coupler.errors import CouplerError

USER = {"role": "user", "content": "hi"}
NAME, REASONS, ANSWERS = "coupler_example", "coupler reasons", "coupler answers"
ARGUMENTS = {"first": 'a "b" {c}\n<d>', "second": [1, {"é": None}]}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Coupler example.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "string"}, "second": {"type": "array", "items": {}}},
            "required": ["first", "second"],
        },
    },
}
WORD = re.compile(r"<[^<>\s]*>|[^<\s]+|<")


@dataclass(frozen=True, slots=True)
class Thinking:
    """The texts around reasoning, such as ``<think>`` and ``</think>``."""

    opens: str
    closes: str

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return texts that a template may refuse in an answer, each in two halves."""
        return ()

    def split(self, text: str, before: str) -> tuple[str, str]:
        """Divide sampled text into reasoning and the rest.

        Args:
            before: the end of the prompt, which may have opened the reasoning.
        """
        text = str.__str__(text)
        start = text.lstrip()
        if start.startswith(self.opens):
            start = start[len(self.opens) :]
        elif not before.rstrip().endswith(self.opens):
            return "", text

        reasoning, closed, rest = start.partition(self.closes)
        return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""


@dataclass(frozen=True, slots=True)
class Calls:
    """The way in which tool calls are written: JSON objects, and the texts around them.

    Attributes:
        opens: the text before the first call. It may be empty.
        between: the text between two calls, None if a turn has one call at most.
        closes: the text behind the last call.
        name: the key of the function's name in the object.
        arguments: the key of its arguments.
    """

    opens: str
    between: str | None
    closes: str
    name: str
    arguments: str

    @property
    def several(self) -> bool:
        """Return whether a turn may have several calls."""
        return self.between is not None

    def read(self, text: str, tools: Sequence[Any]) -> tuple[str, list[tuple[str, Any]]]:
        """Return the text before the calls, and name and arguments of each call.

        Raises:
            Malformed: something that began as a call cannot be read.
        """
        began = loosely(self.opens).search(text)
        if not began or (not self.opens and not self._is_call(text)):
            return text, []

        found, at = [], began.end()
        while True:
            call, at = self._one(text, at)
            found.append(call)
            more = loosely(self.between).match(text, at) if self.between is not None else None
            if more and text[more.end() :].strip():
                at = more.end()
                continue
            if not loosely(self.closes).fullmatch(text, at):
                raise Malformed(f"the text {text[at:][:40]!r} follows a tool call")
            return text[: began.start()].rstrip("\n"), found

    def _is_call(self, text: str) -> bool:
        try:
            self._one(text, 0)
        except Malformed:
            return False
        return True

    def _one(self, text: str, at: int) -> tuple[tuple[str, Any], int]:
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a tool call is no JSON: {error}") from None

        name = value.get(self.name) if isinstance(value, dict) else None
        given = parsed(value.get(self.arguments)) if isinstance(value, dict) else None
        if not isinstance(name, str) or not isinstance(given, dict) or not is_flat(given):
            raise Malformed(f"a tool call lacks {self.name!r}, or {self.arguments!r} as an object")
        return (name, given), end


def call(
    index: int = 0,
    arguments: Mapping[str, Any] = ARGUMENTS,
    name: str = NAME,
) -> dict[str, Any]:
    """Return a tool call for examples, with an id that every template takes."""
    function = {"name": name, "arguments": dict(arguments)}
    return {
        "id": f"example0{index}",
        "type": "function",
        "function": function,
    }


def find_thinking(template: ChatTemplate) -> Thinking | None:
    """Find how the template writes reasoning, or None if it writes none."""
    answer = {
        "role": "assistant",
        "content": ANSWERS,
        "reasoning_content": REASONS,
    }
    try:
        text, header = _answer(template, [answer], [])
    except CouplerError:
        return None
    reasons, answers = text.find(REASONS), text.rfind(ANSWERS)
    if not 0 <= reasons < answers:
        return None

    own = text[shared(text, header) : reasons].strip()
    if not own:  # the generation prompt opens it
        own = (text[:reasons].split() or [""])[-1]
    closes = text[reasons + len(REASONS) : answers].strip()
    return Thinking(own, closes) if own and closes else None


def find_other_end(template: ChatTemplate) -> str:
    """Return the control token that ends an answer in a history, where the template
    ends the last answer with another one, at which the model stops.

    It returns nothing where both are the same, or where an answer ends in no token.

    Raises:
        CouplerError: the template refuses an answer.
    """
    answer = {
        "role": "assistant",
        "content": ANSWERS,
    }
    asks = {
        "role": "user",
        "content": REASONS,
    }
    last = template.text([USER, answer], [], generate=False)
    earlier = template.text(
        [USER, answer, asks],
        [],
        generate=True,
    )

    stops = template.stops.values()
    end = template.directly_behind(earlier, ANSWERS)
    if end in stops or template.directly_behind(last, ANSWERS) not in stops:
        return ""
    shown = earlier.find(REASONS) > earlier.find(ANSWERS)
    return end if shown else ""


def check_tools(template: ChatTemplate) -> None:
    """Check that the template shows tools to the policy.

    Raises:
        Unproved: it does not.
        CouplerError: it refuses them.
    """
    if NAME not in template.text([USER], [TOOL], generate=True):
        raise Unproved("it does not show the tools")


def find_calls(template: ChatTemplate, thinking: Thinking | None) -> Calls:
    """Find how the template writes tool calls, and prove it by reading its examples.

    Raises:
        Unproved: it shows no calls, or not as JSON.
        CouplerError: it refuses them.
    """
    one = calls_text(template, [call()], thinking)
    start, end, value = _object(one)
    names = [key for key, given in value.items() if given == NAME]
    given = [key for key, held in value.items() if parsed(held) == ARGUMENTS]
    if not names or not given:
        raise Unproved("it does not write a tool call as JSON with a name and arguments")

    try:
        two = calls_text(template, [call(), call(1)], thinking)
        second = two.find("{", _object(two)[1])
        between = two[_object(two)[1] : second].strip() if second > 0 else None
    except (CouplerError, Unproved):
        between, two = None, ""
    calls = Calls(
        one[:start].strip(),
        between,
        one[end:].strip(),
        names[0],
        given[0],
    )

    for text, count in ((one, 1), *([(two, 2)] if between is not None else [])):
        try:
            content, read = calls.read(text, [TOOL])
        except Malformed as error:
            raise Unproved(f"its own tool call cannot be read: {error}") from None
        if (
            content.strip()
            or [canonical(c) for c in read] != [canonical([NAME, ARGUMENTS])] * count
        ):
            raise Unproved("its own tool call is read as something else")
    return calls


def calls_text(
    template: ChatTemplate, calls: Sequence[Mapping[str, Any]], thinking: Thinking | None
) -> str:
    """Render an answer of tool calls alone, without header, empty reasoning and end.

    Raises:
        Unproved: the template shows none.
        CouplerError: it refuses them.
    """
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": list(calls),
    }
    text, header = _answer(template, [answer], [TOOL])
    if thinking and not text.startswith(header):
        header = header.rstrip().removesuffix(thinking.opens)
    text = text[shared(text, header) :]
    name = text.find(calls[0]["function"]["name"])
    if name < 0:
        raise Unproved("it does not show tool calls")

    if thinking and thinking.closes in text[:name]:
        text = text[text.index(thinking.closes) + len(thinking.closes) :]
    ends = [text.find(stop) for stop in template.stops.values()]
    return text[: min((at for at in ends if at >= 0), default=len(text))]


def _answer(
    template: ChatTemplate, answers: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> tuple[str, str]:
    """Return what a template writes behind a user's message: answers, and the
    generation prompt.
    """
    before = str.__str__(template.text([USER], tools, generate=False))
    header = str.__str__(template.text([USER], tools, generate=True))
    text = str.__str__(template.text([USER, *answers], tools, generate=False))
    start = min(shared(text, before), shared(header, before))
    return text[start:], header[start:]


def _object(text: str) -> tuple[int, int, dict[str, Any]]:
    """Find the first JSON object that holds the name of the example."""
    for found in re.finditer(r"\{", text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, found.start())
        except ValueError:
            continue
        if NAME in value.values():
            return found.start(), end, value
    raise Unproved("it does not write a tool call as JSON with a name and arguments")


def loosely(text: str) -> re.Pattern[str]:
    """Match a text with any blanks around and between its tags and words."""
    return re.compile(r"\s*" + r"\s*".join(map(re.escape, WORD.findall(text))) + r"\s*")
