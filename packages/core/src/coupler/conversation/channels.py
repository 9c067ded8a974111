"""Read turns that are written in channels, as those of OpenAI's Harmony format.

A turn is several messages. ``<|channel|>analysis<|message|>`` begins reasoning, the
channel ``final`` holds the answer, and a message with a recipient such as
``to=functions.look`` is a tool call. The texts around them are found in the chat
template, which renders examples. The format: https://github.com/openai/harmony.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coupler.conversation.chat_template import ChatTemplate, Unproved
from coupler.conversation.messages import is_flat
from coupler.conversation.reading import (
    ANSWERS,
    NAME,
    REASONS,
    TOOL,
    USER,
    Thinking,
    call,
)
from coupler.conversation.rendering import Malformed
from coupler.conversation.tagged_calls import NAMES, OTHER, check
from coupler.data.traced import TEMPLATE, TEXT, Traced
from coupler.errors import CouplerError

CONTROL = re.compile(r"<[^<>\s]+>")
SHOWN = 40  # characters of a text in a sentence


@dataclass(frozen=True, slots=True)
class Part:
    """A message of a turn.

    Attributes:
        start: the place of its header in the turn.
        channel: the channel that it is written to.
        recipient: what it is addressed to, such as ``functions.look``, or nothing.
        wrong: why it cannot be read. The rest of the turn then belongs to it.
    """

    start: int
    channel: str = ""
    recipient: str = ""
    body: str = ""
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Channels(Thinking):
    """The texts around the messages of a turn. ``opens`` begins reasoning, and
    ``closes`` ends a message.

    Attributes:
        speaker: the text that begins a message of the policy.
        channel: the control token before the name of a channel.
        message: the control token between a header and its text.
        names: the channels of reasoning, of answers and of tool calls.
        addresses: the text before a recipient, such as ``to=``.
        functions: the text before the name of a tool, such as ``functions.``.
    """

    speaker: str
    channel: str
    message: str
    names: tuple[str, str, str]
    addresses: str
    functions: str

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the texts that begin reasoning and an answer."""
        reasoning, answer, _ = self.names
        return (
            (f"{self.channel}{reasoning}", self.message),
            (f"{self.channel}{answer}", self.message),
        )

    def split(self, text: str, before: str) -> tuple[str, str]:
        """Divide sampled text into reasoning and the rest.

        The rest is the text for the user. Where there is a tool call, or a message that
        cannot be read, it is all that follows the reasoning, as it was sampled.
        """
        if TEMPLATE not in _marks(text):
            return "", str.__str__(text)
        parts = self.parts(text)
        reasoning = "\n".join(part.body for part in parts if self._is_reasoning(part))

        others = [part for part in parts if not self._is_reasoning(part)]
        if any(part.wrong or part.recipient for part in others):
            return reasoning, text[others[0].start :]
        return reasoning, self.content(others)

    def parts(self, text: str) -> list[Part]:
        """Return the messages of a turn. Only control tokens divide them, and not
        letters that spell one.
        """
        found: list[Part] = []
        at = 0

        while at < len(text) and not (found and found[-1].wrong):
            part, at = self._part(text, at, first=not found)
            found.append(part)
        return found

    def content(self, parts: Sequence[Part]) -> str:
        """Return the text for the user."""
        told = [part.body for part in parts if not part.recipient if not self._is_reasoning(part)]
        return "\n".join(told)

    def _part(self, text: str, at: int, *, first: bool) -> tuple[Part, int]:
        """Return the message at a place, and the place behind it."""

        def wrong(reason: str, place: int) -> tuple[Part, int]:
            shown = str.__str__(text[place : place + SHOWN])
            return Part(at, wrong=f"{reason}: {shown!r}"), len(text)

        begin = at
        if text.startswith(self.speaker, at) and _marks(text)[at] == TEMPLATE:
            begin += len(self.speaker)
        elif not first:
            return wrong("a message does not begin after the end of another one", at)

        named = find_control(text, self.channel, begin)
        opened = find_control(text, self.message, begin)
        if not begin <= named < opened:
            return wrong("a message has no header with a channel", at)
        header = self._header(
            text[begin:named],
            text[named + len(self.channel) : opened],
        )
        if not header:
            return wrong("a message has a header that cannot be read", at)

        start = opened + len(self.message)
        end = find_control(text, self.closes, start)
        if end < 0:  # the token that ends the turn ended it
            end = len(text)
        inner = _marks(text).find(TEMPLATE, start, end)
        if inner >= 0:
            return wrong("a message holds a control token", inner)
        channel, recipient = header
        made = Part(
            at,
            channel,
            recipient,
            str.__str__(text[start:end]),
        )
        return made, end + len(self.closes)

    def _header(self, before: str, behind: str) -> tuple[str, str] | None:
        """Return channel and recipient, or None. The recipient is on either side of the
        channel. A control token and a word may say the type of the text.
        """
        first = str.__str__(before).split()
        words = CONTROL.sub(" ", behind).split()
        if not words or words[0] not in self.names:
            return None

        channel, *rest = words
        to = [
            word.removeprefix(self.addresses)
            for word in (*first, *rest)
            if word.startswith(self.addresses)
        ]
        types = len(first) + len(rest) - len(to)
        if len(to) > 1 or types > 1 or len(first) > len(to):
            return None
        return channel, "".join(to)

    def _is_reasoning(self, part: Part) -> bool:
        return part.channel == self.names[0] and not part.recipient and not part.wrong


@dataclass(frozen=True, slots=True)
class ChannelCalls:
    """Reads a tool call that is a message with a recipient."""

    channels: Channels
    several: bool = field(default=False, init=False)  # the token that ends a call ends a turn

    def read(self, text: str, tools: Sequence[Any]) -> tuple[str, list[tuple[str, Any]]]:
        """Return the text before the call, and its name and arguments.

        Raises:
            Malformed: a message cannot be read, or the call is not the last one.
        """
        if TEMPLATE not in _marks(text):
            return str.__str__(text), []
        parts = self.channels.parts(text)
        if parts[-1].wrong:
            raise Malformed(parts[-1].wrong)

        calls = [part for part in parts if part.recipient]
        if len(calls) > 1:
            raise Malformed(f"a turn has {len(calls)} tool calls, and may have one")
        if calls and calls != parts[-1:]:
            raise Malformed(f"the text {parts[-1].body[:SHOWN]!r} follows a tool call")
        return self.channels.content(parts), [self._call(part) for part in calls]

    def _call(self, part: Part) -> tuple[str, Any]:
        functions = self.channels.functions
        name = part.recipient.removeprefix(functions)
        if not part.recipient.startswith(functions) or not NAMES.fullmatch(name):
            shown = part.recipient[:SHOWN]
            raise Malformed(f"a tool call goes to {shown!r}, and not to {functions}NAME")

        try:
            given = json.loads(part.body)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a tool call is no JSON: {error}") from None
        if not isinstance(given, dict) or not is_flat(given):
            raise Malformed("the arguments of a tool call are no object, or nest too deeply")
        return name, given


def find_channels(template: ChatTemplate) -> Channels | None:
    """Find how the template writes channels, or None if it writes none.

    Its examples are read back.
    """
    answer = {
        "role": "assistant",
        "content": ANSWERS,
    }
    try:
        speaker, bare = _turn(template, answer, [])
        _, thought = _turn(
            template,
            {**answer, "reasoning_content": REASONS},
            [],
        )
        _, asks = _turn(template, _asks(call()), [TOOL])
    except (CouplerError, Unproved):
        return None

    control = template.control_text
    match control.findall(thought), control.split(thought):
        case (
            [channel, message, end, start, *again],
            ["", reasoning, said, "", role, final, told],
        ) if (again, said, told) == ([channel, message], REASONS, ANSWERS):
            pass
        case _:
            return None
    commentary = re.search(rf"{re.escape(channel)}(\w+)", asks)
    to = re.search(rf"(?:\A|\s)(\w+=)(\S*?){NAME}", asks)
    if f"{start}{role}" != speaker or not commentary or not to:
        return None

    made = Channels(
        opens=f"{channel}{reasoning}{message}",
        closes=end,
        speaker=speaker,
        channel=channel,
        message=message,
        names=(reasoning, final, commentary[1]),
        addresses=to[1],
        functions=to[2],
    )
    read = [made.split(turn, "") for turn in (thought, bare)]
    return made if read == [(REASONS, ANSWERS), ("", ANSWERS)] else None


def find_channel_calls(template: ChatTemplate, thinking: Thinking | None) -> ChannelCalls:
    """Prove that the template's own tool calls are read.

    Raises:
        Unproved: it writes no channels, or its call is read as something else.
        CouplerError: it refuses them.
    """
    if not isinstance(thinking, Channels):
        raise Unproved("it does not write a tool call to a channel")
    made = ChannelCalls(thinking)

    for one in (call(), call(name=OTHER), call(arguments={})):
        for reasoning in ("", REASONS):
            answer = _asks(one) | {"reasoning_content": reasoning}
            _, turn = _turn(
                template,
                answer,
                [TOOL],
            )
            found, rest = thinking.split(turn, "")
            if found != reasoning:
                raise Unproved("the reasoning before its own tool call is not read")
            check(made, [one], rest)
    return made


def find_control(text: str, token: str, start: int) -> int:
    """Return the place of a control token from ``start`` on, or -1. Letters that spell
    it are none.
    """
    marks = _marks(text)
    at = str.find(text, token, start)
    while at >= 0 and TEXT in marks[at : at + len(token)]:
        at = str.find(text, token, at + 1)
    return at


def _marks(text: str) -> str:
    return text.marks if isinstance(text, Traced) else TEXT * len(text)


def _asks(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [one],
    }


def _turn(
    template: ChatTemplate, answer: dict[str, Any], tools: Sequence[Any]
) -> tuple[str, Traced]:
    """Return the generation prompt from its last control token on, and an answer as the
    policy would sample it behind the prompt, up to the end of its turn.

    Raises:
        Unproved: the template does not write it behind its generation prompt.
        CouplerError: it refuses the answer.
    """
    prompt = template.text([USER], tools, generate=True)
    text = template.text([USER, answer], tools, generate=False)
    if not text.startswith(str.__str__(prompt)):
        raise Unproved("it does not write an answer behind its generation prompt")

    ids = template.encode(text[len(prompt) :])
    end = next(
        (at for at, id in enumerate(ids) if id in template.stops),
        len(ids),
    )
    if end == len(ids) and ids and ids[-1] in template.control:
        # what is sampled behind this token is refused where it is proved
        end -= 1

    starts = [match.start() for match in template.control_text.finditer(prompt)]
    speaker = str.__str__(prompt)[max(starts, default=0) :]
    return speaker, template.decode(ids[:end])
