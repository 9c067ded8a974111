"""Extend sampled ids with new messages by the model's own chat template.

New messages are rendered behind a short dummy history whose answer is a mark. What
stands behind the end of the marked turn is what the template writes after any history,
which is proved with examples when the renderer starts. Rendering the true history again
would not do: many templates rewrite earlier turns.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import product
from typing import Any

import numpy as np

from coupler.batch.trajectory import Segment
from coupler.conversation.channels import find_channel_calls, find_channels
from coupler.conversation.chat_template import ChatTemplate, EndsOtherwise, Unproved
from coupler.conversation.glue import GlueMemory, dummy
from coupler.conversation.literal_calls import find_literal_calls
from coupler.conversation.messages import became
from coupler.conversation.reading import (
    TOOL,
    USER,
    call,
    check_tools,
    find_calls,
    find_other_end,
    find_thinking,
)
from coupler.conversation.rendering import Malformed, Parsed, ReadsCalls
from coupler.conversation.tagged_calls import find_tagged_calls
from coupler.data.templates import Codec
from coupler.errors import ConfigError, CouplerError
from coupler.interfaces import Message

TAIL = 16  # tokens of a prompt that may open reasoning
ID_DIGITS = 9
STEP = "step"
SAYS = {"content": "coupler says"}  # beside its calls
THOUGHTS = ({}, {"content": f"<think>\n{STEP}\n</think>\n\n"}, {"reasoning_content": STEP})


class Case(StrEnum):
    """The messages that may be appended to what was sampled."""

    USER = "a user's message"
    TOOL = "a tool's result"
    TOOLS = "two tools' results"
    TOOL_AND_USER = "a tool's result and a user's message"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return an example."""
        user = [{"role": "user", "content": "coupler asks"}]
        tools = [_result(0), _result(1)]
        made = {
            Case.USER: user,
            Case.TOOL: tools[:1],
            Case.TOOLS: tools,
        }
        return made.get(self, [*tools[:1], *user])

    @property
    def calls(self) -> int:
        """Return how many tool calls stand before the example."""
        return sum(message["role"] == "tool" for message in self.messages)


ROLES = {
    Case.USER: re.compile("user"),
    Case.TOOL: re.compile("tool"),
    Case.TOOLS: re.compile("tool( tool)+"),
    Case.TOOL_AND_USER: re.compile("tool( tool)* user"),
}


class TemplateRenderer:
    """A renderer for any model, by its own chat template.

    Earlier reasoning stays in what the policy is fed, also where the template would
    drop it from a history. Without ``keep_reasoning`` it is dropped there, and the
    conversation begins a new row. A user's message begins one too where the template
    ends an answer of the history with a token that the model does not stop at.

    Args:
        codec: the tokenizer and the chat template.
        tools: whether the policy may call tools.
        calls: reads tool calls that the model writes otherwise than as JSON. Giving it
            implies ``tools``.
        stop: further tokens that end a turn.

    Raises:
        ConfigError: the template is not proved for what a conversation needs.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        tools: bool = False,
        calls: ReadsCalls | None = None,
        stop: Iterable[str] = (),
        keep_reasoning: bool = True,
    ) -> None:
        self.folder, self.keep_reasoning = codec.folder, keep_reasoning
        try:
            self.stop = codec.stop_ids(stop)
        except ConfigError:
            raise
        except CouplerError as error:
            raise self._refused("an answer", error) from None
        self.template = ChatTemplate(codec, self.stop)
        self.glue = GlueMemory(self.template)
        self.thinking = find_channels(self.template) or find_thinking(self.template)
        if self.thinking:
            self.template.form.part(self.thinking.headers)

        self.proved: set[Case] = set()
        # the token that ends an answer in a history, where the policy ends it otherwise
        self.other_end = ""
        # False where the template moves such a text behind the results
        self.text_beside_calls = True
        self.calls: ReadsCalls | None = None
        self._require(Case.USER)
        if tools or calls:
            self._require_tools(calls)

    def __str__(self) -> str:
        rows = (
            f". It ends an earlier answer with {self.other_end}, which the model does not "
            "stop at, so each question behind an answer begins a new row, and is prefilled anew"
        )
        return f"the chat template of {self.folder}" + (rows if self.other_end else "")

    def render(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[int, ...]:
        """Encode messages up to where the policy speaks.

        Raises:
            ConfigError: tools are offered, for which nothing was proved.
            CouplerError: the template refuses the messages.
        """
        if tools and self.calls is None:
            raise ConfigError(
                f"{len(tools)} tools are offered, and the renderer was made without tools.\n"
                "  set:  TemplateRenderer(codec, tools=True)"
            )
        return self.template.encode(self.template.text(messages, tools, generate=True))

    def extend(
        self,
        history: Sequence[Message],
        ids: tuple[int, ...],
        new: Sequence[Message],
        tools: Sequence[Any],
    ) -> tuple[Segment, ...] | None:
        """Encode what follows ``ids``, or return None if that is not proved.

        It is not proved where ``new`` is of no proved case, where a tool call has no
        result, where results come without tools, where the history has no message of a
        user, where the turn ended in another token than the template's, where the
        template moves the text that the policy said beside its calls, or where it
        refuses the messages. It is also None where ``ids`` hold reasoning that the
        template drops, without ``keep_reasoning``.
        """
        roles = " ".join(message["role"] for message in new)
        case = next((case for case in self.proved if ROLES[case].fullmatch(roles)), None)
        if case is None or not any(message["role"] == "user" for message in history):
            return None

        calls = history[-1].get("tool_calls", [])
        if len(calls) != sum(message["role"] == "tool" for message in new):
            return None
        if (calls and not tools) or (len(calls) > 1 and Case.TOOLS not in self.proved):
            return None
        if calls and history[-1].get("content") and not self.text_beside_calls:
            return None
        if not self.keep_reasoning and self._drops(history, ids, new, tools):
            return None
        try:
            stop, segments = self.glue.after(calls, new, tools)
        except (Unproved, CouplerError):
            return None
        return segments if ids[-1:] == (stop,) else None

    def _drops(
        self,
        history: Sequence[Message],
        ids: tuple[int, ...],
        new: Sequence[Message],
        tools: Sequence[Any],
    ) -> bool:
        """Return whether ``ids`` hold reasoning that the template would not show."""
        thoughts = [str(message.get("reasoning_content") or "").strip() for message in history]
        if not any(thoughts):
            return False

        fed = self.template.decode(ids)
        shown = str.__str__(self.template.text([*history, *new], tools, generate=True))
        return any(thought in fed and thought not in shown for thought in thoughts if thought)

    def parse(self, ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Any]) -> Parsed:
        """Read the message that the policy sampled as ``ids``.

        Tool calls are read only if ``tools`` are offered.
        """
        ended = len(ids) > 0 and ids[-1] in self.stop
        said = self.template.decode(ids[:-1] if ended else ids)
        reasoning, text = "", str.__str__(said)
        if self.thinking:
            reasoning, text = self.thinking.split(said, self.template.decode(prompt[-TAIL:]))
        message: dict[str, Any] = {"role": "assistant", "content": str.__str__(text)}
        if reasoning:
            message["reasoning_content"] = reasoning

        if not tools or self.calls is None:
            return Parsed(message)
        try:
            content, calls = self.calls.read(text, tools)
        except Malformed as error:
            return Parsed(message, str(error))
        if calls:
            made = [called((len(prompt), index, *ids), *read) for index, read in enumerate(calls)]
            message |= {"content": content, "tool_calls": made}
        return Parsed(message)

    def _require_tools(self, calls: ReadsCalls | None) -> None:
        try:
            check_tools(self.template)
            self.calls = calls or self._found_calls()
        except (Unproved, CouplerError) as error:
            raise self._refused("a tool call", error) from None

        # a policy that writes one call at most gets one result
        several = getattr(self.calls, "several", True)
        for case in (Case.USER, Case.TOOL, *([Case.TOOLS] if several else [])):
            self._require(case)
        try:
            self._prove(Case.TOOL_AND_USER)
            self.proved.add(Case.TOOL_AND_USER)
        except (Unproved, CouplerError):
            pass  # such messages begin a new row

    def _found_calls(self) -> ReadsCalls:
        """Find how the template writes calls: as JSON, with tags around their parts, as
        a function with values, or in a channel.

        Raises:
            Unproved: in none of these ways.
        """
        reasons = []
        for find in (find_calls, find_tagged_calls, find_literal_calls, find_channel_calls):
            try:
                return find(self.template, self.thinking)
            except Unproved as error:
                reasons.append(str(error))
        raise Unproved("; and ".join(dict.fromkeys(reasons)))

    def _require(self, case: Case) -> None:
        try:
            self._prove(case)
        except (Unproved, CouplerError) as error:
            if case is Case.USER and isinstance(error, EndsOtherwise):
                self.other_end = find_other_end(self.template)
            if case is Case.USER and self.other_end:
                return
            raise self._refused(case, error) from None
        self.proved.add(case)

    def _refused(self, case: str, error: Exception) -> ConfigError:
        reason = str(error).partition("\n")[0]
        stop = ""
        if isinstance(error, EndsOtherwise):
            stop = f"; or sampling.stop=['{error.token}'], if the model ends such a turn with it"
        return ConfigError(
            f"the chat template of {self.folder} cannot be continued exactly "
            f"(case: {case}): {reason}.\n"
            "  try:  another chat_template in tokenizer_config.json, which ends every turn with "
            f"a token that the model stops at; or a Renderer of your own{stop}"
        )

    def _prove(self, case: Case) -> None:
        """Compare what follows the dummy history with what follows longer ones.

        Raises:
            Unproved: they differ, or the new messages are not shown.
            CouplerError: the template refuses the messages.
        """
        new, tools = case.messages, [TOOL] if self.calls is not None else []
        answer = dummy([call(i) for i in range(case.calls)])
        expected = self.template.after(
            [USER],
            answer,
            new,
            tools,
        )
        at = 0
        for message in new:
            at = expected[2].find(message["content"], at)
            if at < 0:
                raise Unproved(f"it does not show {message['content']!r} of {case}")

        said = (*THOUGHTS, SAYS) if case.calls else THOUGHTS
        for history, thought in product(self._histories(), said):
            found = self.template.after(
                history,
                {**answer, **thought},
                new,
                tools,
            )
            if found == expected:
                continue
            if not case.calls or "content" not in thought:
                raise Unproved(
                    "what it writes after a turn depends on the turns before: "
                    + became(expected[2], found[2])
                )
            self.text_beside_calls = False

    def _histories(self) -> list[list[dict[str, Any]]]:
        """Return histories in front of an answer, with earlier reasoning and tools."""
        system = [{"role": "system", "content": "coupler rules"}]
        try:
            self.template.text([*system, USER], [], generate=True)
        except CouplerError:
            system = []

        said = {"role": "assistant", "content": "coupler says"}
        thought = [
            {
                **said,
                **more,
                "content": f"{more.get('content', '')}coupler says",
            }
            for more in THOUGHTS
        ]
        histories = [[*system, USER, one, USER] for one in thought]
        if self.calls is not None:
            asked = {
                "role": "assistant",
                "content": "",
                "tool_calls": [call()],
            }
            histories += [
                [USER, asked, _result(0), said, USER],
                [USER, {**asked, "reasoning_content": STEP}, _result(0)],
            ]
        return [[USER], *histories]


def _result(index: int) -> dict[str, Any]:
    made = call(index)
    return {
        "role": "tool",
        "content": f"coupler result {index}",
        "tool_call_id": made["id"],
        "name": made["function"]["name"],
    }


def called(place: tuple[int, ...], name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call with an id of nine letters and digits, which some templates
    ask for.

    Args:
        place: numbers that no other call of the conversation has, for the id.
        arguments: an object of JSON.
    """
    id = hashlib.blake2b(np.array(place, np.int64).tobytes()).hexdigest()[:ID_DIGITS]
    given = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": given},
    }
