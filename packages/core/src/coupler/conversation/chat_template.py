"""Render a model's chat template with tools, and find the place behind a mark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from coupler.batch.trajectory import Origin, Segment
from coupler.conversation.answers import AnswerForm
from coupler.conversation.messages import shared, tidy
from coupler.data.control import PlainText
from coupler.data.templates import MARK, Codec
from coupler.data.traced import TEMPLATE, TEXT, Traced, concat, runs, template, trace
from coupler.errors import CouplerError
from coupler.interfaces import Message

SHORT, KEPT = 512, 1024
"""The ids of the last ``KEPT`` texts of at most ``SHORT`` characters are kept. What a
template writes between messages is the same at every turn."""


class Unproved(Exception):
    """A chat template does not show what a conversation needs of it."""


class EndsOtherwise(Unproved):
    """An answer is followed by a control token that the model does not stop at."""

    def __init__(self, reason: str, token: str) -> None:
        super().__init__(f"{reason}, but {token!r} does")
        self.token = token


class ChatTemplate:
    """The chat template of one tokenizer. Only the template writes control tokens.

    Attributes:
        stops: contents of the control tokens that end a turn of the policy, by id.
        form: the form in which the template takes an answer.
    """

    def __init__(self, codec: Codec, stop: tuple[int, ...]) -> None:
        if not codec.tokenizer.chat_template:
            raise CouplerError(
                f"a conversation needs a chat template, which the tokenizer of {codec.folder} "
                "lacks.\n  set:  chat_template in its tokenizer_config.json"
            )
        self.codec, self._plain = codec, PlainText(codec.tokenizer)
        self.control = self._plain.control
        self.stops = {id: self.control[id] for id in stop if id in self.control}
        self.form = AnswerForm(codec)
        self._encoded = lru_cache(KEPT)(
            lambda text, marks: self._plain.encode(Traced(text, marks)),
        )

        texts = sorted(
            self.control.values(),
            key=len,
            reverse=True,
        )
        self.control_text = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        *,
        generate: bool,
        follow: Callable[[Any], Any] = trace,
    ) -> Traced:
        """Render messages, with the generation prompt if ``generate``.

        Args:
            follow: makes traced messages of messages.

        Raises:
            CouplerError: the template refuses them.
        """
        shown = [self.form.of(tidy(each)) for each in messages]
        return self.codec.render(shown, tools, generate=generate, follow=follow)

    def encode(self, text: Traced) -> tuple[int, ...]:
        """Encode rendered text."""
        if len(text) > SHORT:
            return self._plain.encode(text)
        return self._encoded(str.__str__(text), text.marks)

    def decode(self, ids: Sequence[int]) -> Traced:
        """Return the text of ``ids``, to be parsed. Its control tokens are marked as
        the template's, and letters that spell one are text.
        """
        text = self._decoded(ids)
        found = [match.span() for match in self.control_text.finditer(text)]
        tokens = [self.control[id] for id in ids if id in self.control]
        if [text[start:end] for start, end in found] == tokens:
            return _mark(text, found)

        pieces = [
            template(piece) if control else Traced(piece)
            for control, run in groupby(ids, self.control.__contains__)
            for piece in [self._decoded(list(run))]
        ]
        made = concat(pieces)
        # a tokenizer may decode a part otherwise than the whole
        return made if made == text else _mark(text, found)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.codec.tokenizer.decode(
            list(ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def directly_behind(self, text: Traced, words: str) -> str:
        """Return the control token that the template wrote directly behind ``words``,
        but for blanks, or nothing.
        """
        start = text.find(words) + len(words)
        found = self._next_control(text, start)
        if not found or text[start : found.start()].strip():
            return ""
        return found.group()

    def after(
        self,
        history: Sequence[Message],
        answer: Message,
        new: Sequence[Message],
        tools: Sequence[Any],
    ) -> tuple[int, tuple[Segment, ...], str]:
        """Render ``new`` behind an answer, and return what follows the end of its turn.

        Args:
            answer: the message before ``new``. A mark takes the place of the arguments
                of its tool calls, or of its text where they are not shown.

        Returns:
            The token that ends the turn, and what follows it as segments and as text.

        Raises:
            Unproved: the mark or the end of its turn is not found.
            CouplerError: the template refuses the messages.
        """
        mark = MARK
        while mark in f"{answer}{new}{tools}":
            mark += mark
        for marked in with_mark(answer, mark):
            text = self.text([*history, marked, *new], tools, generate=True)
            at = str.rfind(text, mark)
            if at >= 0:
                break
        else:
            raise Unproved("it does not show the text of an earlier answer")

        stop, cut = self.end_of_turn(text, at + len(mark))
        ids, head = self.encode(text), self.encode(text[:cut])
        if ids[: len(head)] != head or head[-1] != stop:
            raise Unproved(f"the tokenizer merges {self.stops[stop]!r} with what follows it")
        return (
            stop,
            self._segments(
                text,
                cut,
                ids,
                len(head),
            ),
            str.__str__(text)[cut:],
        )

    def behind(self, text: Traced, stop: int) -> tuple[Segment, ...] | None:
        """Divide text that begins with the token ``stop``, which ends a turn, into what
        follows it. Return None if it does not begin so.
        """
        ids = self.encode(text)
        if ids[:1] != (stop,):
            return None
        return self._segments(
            text,
            len(self.stops[stop]),
            ids,
            1,
        )

    def between(self, text: Traced, opens: int, closes: int) -> tuple[Segment, ...] | None:
        """Divide text from the control token ``opens`` to ``closes``. Return None if it
        holds others, or does not begin and end so.
        """
        ids = self._plain.plain_ids(str.__str__(text))
        if [id for id in ids if id in self.control] != [opens, closes]:
            return None
        if ids[0] != opens or ids[-1] != closes:
            return None
        return self._segments(text, 0, ids, 0)

    def end_of_turn(self, text: Traced, start: int) -> tuple[int, int]:
        """Return the first token of :attr:`stops` that the template wrote from
        ``start`` on, and the place behind it.
        """
        plain = str.__str__(text)
        found = []
        for id, content in self.stops.items():
            at = plain.find(content, start)
            while at >= 0 and TEXT in text.marks[at : at + len(content)]:
                at = plain.find(content, at + 1)
            if at >= 0:
                found.append((at, -len(content), id))
        if not found:
            names = ", ".join(self.stops.values())
            reason = f"none of the tokens that end a turn ({names}) follows an answer"
            other = self._next_control(text, start)
            raise EndsOtherwise(reason, other.group()) if other else Unproved(reason)

        at, size, id = min(found)
        return id, at - size

    def _next_control(self, text: Traced, start: int) -> re.Match[str] | None:
        """Find the first control token that the template wrote from ``start`` on."""
        for match in self.control_text.finditer(text, start):
            if TEXT not in text.marks[match.start() : match.end()]:
                return match
        return None

    def _segments(
        self, text: Traced, cut: int, ids: tuple[int, ...], done: int
    ) -> tuple[Segment, ...]:
        """Divide ``ids`` from ``done`` on, which encode ``text`` from ``cut`` on, into
        tokens of the template and tokens of messages.
        """
        made, base = [], (cut, done)
        for mark, end in runs(text.marks, cut):
            if end == len(text):
                until = len(ids)
            elif mark == TEXT and (control := self._next_id(text, end, ids, done)):
                until, base = control, (end, control)
            else:
                until, base = self._until(text, end, ids, base)
            if until > done:
                origin = Origin.GLUE if mark == TEMPLATE else Origin.OBSERVATION
                made.append(Segment(ids[done:until], origin))
                done = until
        return tuple(made)

    def _next_id(self, text: Traced, end: int, ids: tuple[int, ...], done: int) -> int:
        """Return the place in ``ids`` of the control token that the template wrote at
        ``end``, 0 where it wrote none there.

        Between it and ``done`` lies text of a message, which holds none. It saves
        encoding the text once more.
        """
        found = self.control_text.match(text, end)
        if not found or TEXT in text.marks[end : found.end()]:
            return 0

        control, unknown = self.control, self._plain.unknown
        controls = (at for at in range(done, len(ids)) if ids[at] in control and ids[at] != unknown)
        at = next(controls, 0)
        return at if at and control[ids[at]] == found.group() else 0

    def _until(
        self, text: Traced, end: int, ids: tuple[int, ...], base: tuple[int, int]
    ) -> tuple[int, tuple[int, int]]:
        """Return how many of ``ids`` encode ``text`` up to ``end``, and the next base.

        Args:
            base: a place in the text and the number of ids before it. The text is
                encoded from there. To encode all of it for each result of a tool would
                take half a minute for some hundreds of them.
        """
        start, before = base
        found = self.encode(text[start:end])
        here = ids[before : before + len(found)]
        same = len(found) if here == found else shared(here, found)
        if start and found and not same:
            # the base is inside of a word
            return self._until(text, end, ids, (0, 0))

        # unknown words are equal, whatever their letters
        exact = same == len(found) and self._plain.unknown not in found
        until = before + same
        return until, (end, until) if exact else base


def with_mark(answer: Message, mark: str) -> Iterator[dict[str, Any]]:
    """Put ``mark`` in the place of the arguments of calls, and in that of the text."""
    if "tool_calls" in answer:
        calls = [
            {**call, "function": {**call["function"], "arguments": {mark: mark}}}
            for call in answer["tool_calls"]
        ]
        yield {**answer, "tool_calls": calls}
    yield {**answer, "content": f"{answer.get('content', '')}{mark}"}


def _mark(text: str, control: Sequence[tuple[int, int]]) -> Traced:
    """Mark the places of control tokens in a text."""
    marks = list(TEXT * len(text))
    for start, end in control:
        marks[start:end] = TEMPLATE * (end - start)
    return Traced(text, "".join(marks))
