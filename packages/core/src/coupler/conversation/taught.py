"""Encode whole conversations for supervised training, with the tokens of the assistant
as targets.

A conversation is rendered once by the chat template, and encoded as one text. Every
character of it carries the number of the message that it came from. So the turns of the
assistant are found in the rendering itself, and no turn is rendered apart and joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from coupler.batch.trajectory import Origin, Segment, Trajectory
from coupler.conversation.bridge import TemplateRenderer
from coupler.conversation.chat_template import ChatTemplate, Unproved
from coupler.conversation.messages import became, tidy
from coupler.data.dataset import Row
from coupler.data.options import DataConfig, TrainOn
from coupler.data.templates import Codec, messages_of
from coupler.data.traced import TEMPLATE, TEXT, Traced, template, trace
from coupler.errors import ConfigError, CouplerError, DataError

# Marks the text of message i by the character FIRST + i.
FIRST = 0x100
APART = "data.keep_reasoning=false, which makes a row of such a turn, or data.train_on=last"
WAYS = (
    "another chat_template in tokenizer_config.json, which ends every turn with a token "
    "that the model stops at"
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered conversation.

    Attributes:
        marks: for each character :data:`TEMPLATE`, the mark of its message, or
            :data:`TEXT` where the template has mixed several.
    """

    text: Traced
    marks: str

    def behind_text(self, end: int, but: str = "") -> int:
        """Return the place behind the last character before ``end`` that is of a
        message, and of none that ``but`` marks.
        """
        ours = (TEMPLATE, but)
        return next((i + 1 for i in range(end - 1, -1, -1) if self.marks[i] not in ours), 0)

    @property
    def header(self) -> str:
        """Return what the template writes behind the last message."""
        return str.__str__(self.text)[self.behind_text(len(self.marks)) :]


@dataclass(frozen=True, slots=True)
class Turn:
    """The words of the policy in a rendering, from behind the generation prompt up to
    the token that ends its turn.
    """

    start: int
    end: int
    stop: int


class Conversations:
    """Makes the examples of rows that are whole conversations.

    Turns are trained from behind the generation prompt up to the token that ends them,
    with reasoning and tool calls as the template writes them. Where the template writes
    an earlier turn otherwise than the policy would have said it, without its reasoning
    for example, or what stood before it, ``data.keep_reasoning`` decides: either the
    turn stays as it was said, as in an episode, or it becomes a row of its own.

    Attributes:
        unshown: reasoning that the template writes nowhere, so that it is not trained.

    Raises:
        CouplerError: the tokenizer has no chat template, or no token that ends a turn.
    """

    def __init__(self, codec: Codec, config: DataConfig) -> None:
        self.codec, self.config = codec, config
        self.template = ChatTemplate(codec, codec.stop_ids(()))
        self.renderer = cache(self._renderer)
        self.unshown = 0

    def __call__(self, row: Row) -> list[Trajectory]:
        """Return what a conversation trains, one trajectory or several.

        Raises:
            DataError: the template refuses the messages, or does not show where a turn
                begins and ends.
        """
        try:
            messages = [
                tidy(message) for message in messages_of(row.prompt, self.config.system_prompt)
            ]
            return self._rows(messages, row.tools)

        except (CouplerError, Unproved) as error:
            text = str(error)
            if "try:" not in text:
                text = f"{text.removesuffix('.')}.\n  try:  {WAYS}"
            where = row.place(self.config.named)
            raise DataError(f"{where}, a conversation: {text}") from None

    def _rows(self, messages: list[dict[str, Any]], tools: Sequence[Any]) -> list[Trajectory]:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = turns if self.config.train_on is TrainOn.ALL else turns[-1:]
        keeps = self.config.keep_reasoning

        whole = self._render(messages, tools)
        asked = {k: self._asked(messages[:k], tools) for k in turns if keeps or k in wanted}
        places = {k: self._turn(whole, k, before.header) for k, before in asked.items()}
        alone = {k: self._render(messages[: k + 1], tools) for k in asked}
        said = {k: self._said(alone[k], k, asked[k]) for k in asked}

        for k in wanted:
            thought = messages[k].get("reasoning_content", "").strip()
            self.unshown += thought not in str.__str__(alone[k].text)
        rewritten = [k for k in asked if not _same(whole, places[k], alone[k], said[k])]
        if rewritten and keeps:
            return [
                self._kept(
                    messages,
                    tools,
                    alone,
                    said,
                    wanted,
                )
            ]
        in_place = [turn for k in wanted if k not in rewritten and (turn := places[k])]
        rows = [self._encoded(whole, in_place)] if in_place else []
        return [*rows, *(self._encoded(alone[k], [said[k]]) for k in rewritten)]

    def _kept(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any],
        alone: Mapping[int, Rendering],
        said: Mapping[int, Turn],
        wanted: Sequence[int],
    ) -> Trajectory:
        """Join the turns as they were said, with what the template writes between them.

        That is what an episode of the policy would have recorded.

        Raises:
            Unproved: it is not proved what the template writes there.
        """
        renderer, segments = self.renderer(bool(tools)), list[Segment]()
        for k, following in pairwise([*said, len(messages)]):
            spoken = self._encoded(alone[k], [said[k]])
            prompt, target = spoken.segments[0], spoken.segments[1]
            if not segments:
                segments.append(prompt)
            segments.append(target if k in wanted else Segment(target.ids, Origin.PROMPT))
            if k == wanted[-1]:
                return Trajectory(tuple(segments))

            ids = tuple(id for segment in segments for id in segment.ids)
            history, new = messages[: k + 1], messages[k + 1 : following]
            between = renderer.extend(
                history,
                ids,
                new,
                tools,
            )
            if between is None:
                raise Unproved(
                    f"{renderer} writes turn {k} (from 0) otherwise once others follow, and "
                    f"does not show what stands before turn {following}.\n"
                    f"  try:  {APART}"
                )
            segments += between
        raise AssertionError("the last wanted turn is among those that were said")

    def _renderer(self, tools: bool) -> TemplateRenderer:
        try:
            return TemplateRenderer(
                self.codec,
                tools=tools,
            )
        except ConfigError as error:
            raise Unproved(f"{error}\n  or:   {APART}") from None

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, generate: bool = False
    ) -> Rendering:
        numbered = [trace(message, chr(FIRST + i)) for i, message in enumerate(messages)]
        found = self.codec.render(
            numbered,
            tools,
            generate=generate,
        )
        if self.config.control_tokens:
            return Rendering(template(str.__str__(found)), found.marks)
        text = "".join(mark if mark == TEMPLATE else TEXT for mark in found.marks)
        return Rendering(Traced(str.__str__(found), text), found.marks)

    def _asked(self, before: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> Rendering:
        """Render what the policy is shown before it speaks."""
        if not before:
            raise Unproved(
                "it begins with a message of the assistant, which answers nothing.\n"
                "  try:  a message of a user before it"
            )
        return self._render(before, tools, generate=True)

    def _turn(self, rendering: Rendering, k: int, header: str) -> Turn | None:
        """Find what the policy says as message ``k``.

        The answer is None where the rendering shows nothing of it, or begins it
        otherwise than with the generation prompt.

        Raises:
            Unproved: the end of the turn is not found.
        """
        mark = chr(FIRST + k)
        first = rendering.marks.find(mark)
        if first < 0:
            return None
        start = rendering.behind_text(first, but=mark)
        if not str.__str__(rendering.text).startswith(header, start):
            return None

        start += len(header)
        last = rendering.marks.rfind(mark) + 1
        stop, end = self.template.end_of_turn(rendering.text, last)
        if start > first or set(rendering.marks[start:end]) - {TEMPLATE, TEXT, mark}:
            raise Unproved(
                f"{self._named(k)} does not end with a token of "
                f"{', '.join(self.template.stops.values())}"
            )
        return Turn(start, end, stop)

    def _said(self, rendering: Rendering, k: int, asked: Rendering) -> Turn:
        """Return the last turn of a rendering.

        Raises:
            Unproved: the policy could not have said it.
        """
        found = self._turn(rendering, k, asked.header)
        if not found:
            raise Unproved(
                f"{self._named(k)} is not shown behind the generation prompt {asked.header[-60:]!r}"
            )

        shown, before = (str.__str__(each.text) for each in (asked, rendering))
        if before[: found.start] != shown:
            raise Unproved(
                f"{self._named(k)} stands behind another text than the policy is shown before it: "
                + became(shown, before[: found.start])
                + ".\n  try:  another chat_template, or what it leaves out as text of the question"
            )
        return found

    def _named(self, k: int) -> str:
        return f"the chat template of {self.codec.folder} (case: message {k} from 0, an answer)"

    def _encoded(self, rendering: Rendering, turns: Sequence[Turn]) -> Trajectory:
        """Encode a rendering up to its last turn or its end, with ``turns`` as targets.

        A token that holds the end of the generation prompt and the beginning of a turn
        is of the turn.

        Raises:
            Unproved: the tokenizer merges the end of a turn with what follows it.
        """
        ids, places = self.codec.locate(rendering.text)
        segments, done = list[Segment](), 0

        for turn in turns:
            low = next(i for i in range(done, len(ids)) if places[i][1] > turn.start)
            high = next((i for i in range(low, len(ids)) if places[i][0] >= turn.end), len(ids))
            if ids[high - 1] != turn.stop:
                stop = self.template.stops[turn.stop]
                raise Unproved(f"the tokenizer merges {stop!r} with what follows it")
            segments += (
                Segment(ids[done:low], Origin.PROMPT),
                Segment(ids[low:high], Origin.TARGET),
            )
            done = high

        rest = [Segment(ids[done:], Origin.PROMPT)] if ids[done:] else []
        return Trajectory((*segments, *rest))


def _same(one: Rendering, place: Turn | None, other: Rendering, said: Turn) -> bool:
    """Tell whether a turn, and all that stands before it, is written in one rendering
    as it is in the other.
    """
    if place is None:
        return False
    shown = str.__str__(one.text)[: place.end]
    return shown == str.__str__(other.text)[: said.end]
