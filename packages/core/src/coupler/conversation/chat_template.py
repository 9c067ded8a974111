"""Render a model's chat template with tools, and find the place behind a mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from coupler.batch.trajectory import Origin, Segment
from coupler.conversation.messages import shared, tidy
from coupler.data.control import PlainText
from coupler.data.templates import MARK, Codec
from coupler.data.traced import TEMPLATE, TEXT, Traced
from coupler.errors import CouplerError
from coupler.interfaces import Message


class Unproved(Exception):
    """A chat template does not show what a conversation needs of it."""


class ChatTemplate:
    """The chat template of one tokenizer. Only the template writes control tokens.

    Attributes:
        stops: contents of the control tokens that end a turn of the policy, by id.
    """

    def __init__(self, codec: Codec, stop: tuple[int, ...]) -> None:
        if not codec.tokenizer.chat_template:
            raise CouplerError(
                f"a conversation needs a chat template, which the tokenizer of {codec.folder} "
                "lacks.\n  set:  chat_template in its tokenizer_config.json"
            )
        self.codec, self._plain = codec, PlainText(codec.tokenizer)
        self.stops = {id: self._plain.control[id] for id in stop if id in self._plain.control}

    def text(self, messages: Sequence[Message], tools: Sequence[Any], *, generate: bool) -> Traced:
        """Render messages, with the generation prompt if ``generate``.

        Raises:
            CouplerError: the template refuses them.
        """
        return self.codec.render([tidy(each) for each in messages], tools, generate=generate)

    def encode(self, text: Traced) -> tuple[int, ...]:
        """Encode rendered text."""
        return self._plain.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` with its control tokens, to be parsed."""
        return self.codec.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

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
        for marked in _marked(answer, mark):
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
            raise Unproved(f"none of the tokens that end a turn ({names}) follows an answer")

        at, size, id = min(found)
        return id, at - size

    def _segments(
        self, text: Traced, cut: int, ids: tuple[int, ...], done: int
    ) -> tuple[Segment, ...]:
        """Divide ``ids`` from ``done`` on, which encode ``text`` from ``cut`` on, into
        tokens of the template and tokens of messages.
        """
        made, end, base = [], cut, (cut, done)
        for mark, run in groupby(text.marks[cut:]):
            end += len(list(run))
            until, base = (
                (len(ids), base) if end == len(text) else self._until(text, end, ids, base)
            )
            if until > done:
                origin = Origin.GLUE if mark == TEMPLATE else Origin.OBSERVATION
                made.append(Segment(ids[done:until], origin))
                done = until
        return tuple(made)

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
        same = shared(ids[before : before + len(found)], found)
        if start and found and not same:
            # the base is inside of a word
            return self._until(text, end, ids, (0, 0))

        # unknown words are equal, whatever their letters
        exact = same == len(found) and self._plain.tokenizer.unk_token_id not in found
        until = before + same
        return until, (end, until) if exact else base


def _marked(answer: Message, mark: str) -> Iterator[dict[str, Any]]:
    """Put ``mark`` in the place of the arguments of calls, and in that of the text."""
    if "tool_calls" in answer:
        calls = [
            {**call, "function": {**call["function"], "arguments": {mark: mark}}}
            for call in answer["tool_calls"]
        ]
        yield {**answer, "tool_calls": calls}
    yield {**answer, "content": f"{answer.get('content', '')}{mark}"}
