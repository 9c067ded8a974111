"""Remember what a chat template writes around new messages, to render it once.

What it writes depends on the shape of the messages and on what it reads of their texts.
:mod:`coupler.data.opaque` finds out what that is. Where all of it is known, other texts
are put in the places of those that were rendered.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coupler.batch.trajectory import Origin, Segment
from coupler.conversation.chat_template import ChatTemplate, Unproved, with_mark
from coupler.conversation.messages import tidy
from coupler.conversation.reading import USER
from coupler.data.opaque import FIRST_MARK, Step, Watch, replay
from coupler.data.templates import MARK
from coupler.data.traced import TEMPLATE, TEXT, Traced, runs, template, trace
from coupler.errors import CouplerError
from coupler.interfaces import Message

KEPT = 256  # shapes
WAYS = 4  # in which a template may write one shape, by what it reads
MOST = 64  # texts
SHOWN = ("content", "tool_call_id", "name")
CHANCE = re.compile(r"\b(random|lipsum)\b")  # what may come otherwise the next time
OFTEN = 8  # times that a text may be shown, by far less than the sandbox allows
NUMBERED = re.compile(f"[^{TEMPLATE}{TEXT}]")
Key = tuple[tuple[Any, ...], str]
Piece = tuple[str, str] | int
Behind = tuple[int, tuple[Segment, ...]]


@dataclass(frozen=True, slots=True)
class Span:
    """The one text of some glue, and the nearest control tokens around it. Tokenizers
    encode what is between two of them alone.

    Attributes:
        number: that of the text.
        left: the glue in front of it, from the control token on.
        right: the glue behind it, to the end of the control token.
        tokens: the ids of the two control tokens.
        before: ids of glue in front of the first one.
        after: ids of glue behind the second one.
    """

    number: int
    left: str
    right: str
    tokens: tuple[int, int]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def segments(self, text: str, template: ChatTemplate) -> tuple[Segment, ...] | None:
        """Encode the glue around a text, or return None where the text is empty, or
        holds control tokens.
        """
        marks = TEMPLATE * len(self.left) + TEXT * len(text) + TEMPLATE * len(self.right)
        whole = Traced(f"{self.left}{text}{self.right}", marks)
        found = template.between(whole, *self.tokens)
        if not found or len(found) < 2:
            return None

        first, *between, last = found
        if first.origin is not Origin.GLUE or last.origin is not Origin.GLUE:
            return None
        return (
            Segment(self.before + first.ids, Origin.GLUE),
            *between,
            Segment(last.ids + self.after, Origin.GLUE),
        )


@dataclass(frozen=True, slots=True)
class Glue:
    """Hold what a template writes from the end of a turn on, around texts.

    Attributes:
        stop: the token that ends the turn.
        steps: what the template read of the texts.
        pieces: characters and their marks, or the number of a text.
        span: what is encoded anew, where that is less than all.
    """

    stop: int
    steps: tuple[Step, ...]
    pieces: tuple[Piece, ...]
    span: Span | None = None

    def segments(self, texts: Sequence[str], template: ChatTemplate) -> tuple[Segment, ...] | None:
        """Encode the glue around texts. Return None where the template reads something
        else in them than in those that it was found with.
        """
        found = replay(self.steps, texts)
        if found is None:
            return None
        if self.span:
            segments = self.span.segments(found[self.span.number], template)
            if segments:
                return segments
        return template.behind(self._around(found), self.stop)

    def _around(self, found: Sequence[str]) -> Traced:
        made: list[str] = []
        marks: list[str] = []
        for piece in self.pieces:
            if isinstance(piece, int):
                made.append(found[piece])
                marks.append(TEXT * len(found[piece]))
            else:
                made.append(piece[0])
                marks.append(piece[1])
        return Traced("".join(made), "".join(marks))


@dataclass(frozen=True, slots=True)
class Asked:
    """New messages behind an answer, as their shape and their texts."""

    shape: tuple[Any, ...]
    texts: list[str]

    @classmethod
    def of(cls, calls: Sequence[Any], new: Sequence[Message]) -> Asked | None:
        """Take messages apart, or return None where they hold more than texts.

        Raises:
            CouplerError: a message is none.
        """
        shape: list[Any] = [len(calls)]
        texts: list[Any] = []
        for call in calls:
            texts += (call.get("id"), call["function"]["name"])
        for message in new:
            clean = tidy(message)
            shown = [name for name in SHOWN if name in clean]
            if len(clean) != 1 + len(shown):
                return None
            shape.append((clean["role"], *shown))
            texts += [clean[name] for name in shown]

        if len(texts) > MOST:
            return None
        if any(type(text) is not str or MARK in text for text in texts):
            return None
        return cls(tuple(shape), texts)


class GlueMemory:
    """Extends turns as :meth:`ChatTemplate.after` does, behind a dummy history."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.known: OrderedDict[Key, list[Glue]] = OrderedDict()
        # what is rendered each time
        self.refused: set[Key] = set()

        codec = template.codec
        source = str(codec.tokenizer.chat_template)
        self.works = codec.tokenizer.is_fast and not CHANCE.search(source)

    def after(self, calls: Sequence[Any], new: Sequence[Message], tools: Sequence[Any]) -> Behind:
        """Return the token that ends an answer with ``calls``, and the segments of
        ``new`` behind it.

        Raises:
            Unproved: as :meth:`ChatTemplate.after`.
            CouplerError: as :meth:`ChatTemplate.after`.
        """
        asked = Asked.of(calls, new) if self.works else None
        if asked is None or (asked.shape, "") in self.refused:
            return self._rendered(calls, new, tools)

        key = (asked.shape, repr(tools) if tools else "")
        ways = self.known.get(key, [])
        for glue in ways:
            segments = glue.segments(asked.texts, self.template)
            if segments is not None:
                self.known.move_to_end(key)
                return glue.stop, segments

        found = self._rendered(calls, new, tools)
        if len(ways) < WAYS and all(asked.texts) and key not in self.refused:
            self._learn(
                key,
                asked.texts,
                found,
                [USER, dummy(calls), *new],
                tools,
            )
        return found

    def _rendered(
        self, calls: Sequence[Any], new: Sequence[Message], tools: Sequence[Any]
    ) -> Behind:
        stop, segments, _ = self.template.after(
            [USER],
            dummy(calls),
            new,
            tools,
        )
        return stop, segments

    def _learn(
        self,
        key: Key,
        texts: list[str],
        found: Behind,
        messages: Sequence[Message],
        tools: Sequence[Any],
    ) -> None:
        """Keep the glue of messages that were rendered as ``found``, or that there is
        none.
        """
        told = _is_json(tools)
        glue = self._glue(texts, messages, tools) if told else None
        if not glue or (glue.stop, glue.segments(texts, self.template)) != found:
            if len(self.refused) >= KEPT:
                self.refused.clear()
            self.refused.add((key[0], "") if told else key)
            return

        every, span = replay(glue.steps, texts), self._span(glue)
        if every and span and span.segments(every[span.number], self.template) == found[1]:
            glue = replace(glue, span=span)
        self.known.setdefault(key, []).append(glue)
        if len(self.known) > KEPT:
            self.known.popitem(last=False)

    def _glue(
        self, texts: list[str], messages: Sequence[Message], tools: Sequence[Any]
    ) -> Glue | None:
        """Render messages under watch, and return the glue, or None if not all of what
        the template reads is known.
        """
        watch = Watch()
        answer = next(with_mark(messages[1], MARK))
        try:
            text = self.template.text(
                [messages[0], answer, *messages[2:]],
                tools,
                generate=True,
                follow=lambda made: _watched(made, watch),
            )
            plain = str.__str__(text)
            marks = NUMBERED.sub(TEXT, text.marks)
            at = plain.rfind(MARK)
            stop, cut = self.template.end_of_turn(Traced(plain, marks), at + len(MARK))
        except (Unproved, CouplerError):
            return None

        if watch.looked or at < 0:
            return None
        if watch.texts[: len(texts)] != texts or not self._parts(stop):
            return None
        pieces = _pieces(
            plain,
            text.marks,
            cut - len(self.template.stops[stop]),
            watch.texts,
        )
        return None if pieces is None else Glue(stop, tuple(watch.steps), pieces)

    def _span(self, glue: Glue) -> Span | None:
        """Find the control tokens around the one text, or return None where there are
        more texts, or no such tokens.
        """
        match glue.pieces:
            case ((front, before), int(number), (back, behind)):
                pass
            case _:
                return None

        *_, opens = self.template.control_text.finditer(front)
        closes = self.template.control_text.search(back)
        if TEXT in before + behind or not opens.start() or not closes:
            return None

        ids = {content: id for id, content in self.template.control.items()}
        tokens = ids[opens.group()], ids[closes.group()]
        if not all(map(self._parts, tokens)):
            return None
        ahead = self.template.encode(template(front[: opens.start()]))
        rest = self.template.encode(template(back[closes.end() :]))
        return Span(
            number,
            left=front[opens.start() :],
            right=back[: closes.end()],
            tokens=tokens,
            before=ahead[1:],
            after=rest,
        )

    def _parts(self, id: int) -> bool:
        """Return whether a tokenizer encodes what is in front of a control token and
        what is behind it apart.

        A normalizer must not see the token, and no longer token may begin like it.
        """
        added = self.template.codec.tokenizer.added_tokens_decoder
        if id not in added or added[id].normalized:
            return False
        return sum(added[id].content in token.content for token in added.values()) == 1


def dummy(calls: Sequence[Any]) -> dict[str, Any]:
    """Return an answer with calls and without a text."""
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    return made | ({"tool_calls": list(calls)} if calls else {})


def _watched(messages: Sequence[Message], watch: Watch) -> list[dict[str, Any]]:
    """Trace messages. Watch the texts of :class:`Asked`, in its order."""
    made = trace(list(messages))
    for call in made[1].get("tool_calls", ()):
        call["id"] = watch.text(str.__str__(call["id"]))
        call["function"]["name"] = watch.text(str.__str__(call["function"]["name"]))
    for message in made[2:]:
        for name in SHOWN:
            if name in message:
                message[name] = watch.text(str.__str__(message[name]))
    return made


def _pieces(text: str, marks: str, start: int, texts: list[str]) -> tuple[Piece, ...] | None:
    """Divide rendered text from ``start`` on into glue and numbers of texts, or return
    None where a text is not whole, or is shown very often.
    """
    pieces: list[Piece] = []
    shown: Counter[int] = Counter()
    at = 0
    for mark, end in runs(marks):
        first, at = at, end
        number = ord(mark) - FIRST_MARK

        here = slice(max(first, start), end)
        made: list[Piece] = [(text[here], marks[here])]
        if number >= 0:
            times, rest = divmod(end - first, len(texts[number]))
            shown[number] += times
            if rest or shown[number] > OFTEN:
                return None
            made = [number] * times

        if end > start:
            pieces += made
    return tuple(pieces)


def _is_json(tools: Sequence[Any]) -> bool:
    """Return whether tools are told apart by how they are written."""
    try:
        return MARK not in json.dumps(tools)
    except (TypeError, ValueError, RecursionError):
        return False
