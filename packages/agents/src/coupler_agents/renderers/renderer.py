"""Turn messages into ids by a renderer of the library, and ids into a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from coupler.batch.trajectory import Origin, Segment
from coupler.conversation import Codec, Message, Parsed
from coupler.conversation.bridge import ROLES, called
from coupler.conversation.messages import tidy
from coupler_agents.renderers.family import find_family, make
from coupler_agents.renderers.shielded import Shielded

# an unknown tool is no malformed call: its environment says that there is none
READ = ("ok", "unknown_tool")


class LibraryRenderer:
    """A renderer for a family of models that the renderers library knows.

    It is proved against the chat template and against itself when it is made. What the
    policy sampled stays as it is.

    Args:
        codec: the tokenizer and the chat template.
        tools: whether the policy may call tools.
        stop: further tokens that end a turn.
        family: the name of a renderer, or nothing to find it by the model's name.

    Raises:
        ConfigError: there is no such renderer.
        CouplerError: the library is missing, does not know the model, or is not proved
            for it.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        tools: bool = False,
        stop: Iterable[str] = (),
        keep_reasoning: bool = True,
        family: str = "",
    ) -> None:
        from coupler_agents.renderers.proof import prove

        self.codec, self.keep_reasoning, self.tools = codec, keep_reasoning, tools
        self.family, hub = find_family(codec, family)
        self.tokenizer = Shielded(codec, hub or str(codec.folder))
        self.inner = make(
            codec,
            self.family,
            self.tokenizer,
        )
        stops = (*self.inner.get_stop_token_ids(), *codec.stop_ids(stop))
        self.stop = tuple(dict.fromkeys(stops))
        self.proved = prove(self)

    def __str__(self) -> str:
        return f"{self.family} of the renderers library"

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        *,
        generate: bool = True,
    ) -> tuple[int, ...]:
        """Encode messages up to where the policy speaks, or to their end without
        ``generate``.
        """
        return tuple(
            self.inner.render_ids(
                self._given(messages),
                tools=self.tokenizer.shield(tools) or None,
                add_generation_prompt=generate,
            )
        )

    def extend(
        self,
        history: Sequence[Message],
        ids: tuple[int, ...],
        new: Sequence[Message],
        tools: Sequence[Any],
    ) -> tuple[Segment, ...] | None:
        """Encode what follows ``ids``, or return None if that is not proved.

        It is not proved where ``new`` is of no proved case, where a tool call has no
        result, where results come without tools, where the turn ended in another token
        than the template's, or where the library does not go on. It is also None where
        the history has reasoning, without ``keep_reasoning``.
        """
        roles = " ".join(message["role"] for message in new)
        ends = [end for case, end in self.proved.items() if ROLES[case].fullmatch(roles)]
        if ids[-1] not in ends:
            return None

        calls = history[-1].get("tool_calls", [])
        results = [message for message in new if message["role"] == "tool"]
        if len(calls) != len(results) or (calls and not tools):
            return None
        if not self.keep_reasoning and any(m.get("reasoning_content") for m in history):
            return None
        return self.append(
            ids,
            _named(new, calls),
            tools,
        )

    def append(
        self, ids: tuple[int, ...], new: Sequence[Message], tools: Sequence[Any]
    ) -> tuple[Segment, ...] | None:
        """Let the library encode what follows a turn, or return None where it does not.

        Args:
            ids: everything so far. The last one ended the turn.
            new: the messages to append. Results of tools have names.
        """
        # The library looks for the end of the turn in the last part alone, and goes on
        # from a prompt that is not empty.
        before, end = ids[:-1] or ids, ids[-1:]
        found = self.inner.bridge_to_next_turn(
            list(before),
            list(end),
            self._given(new),
            tools=self.tokenizer.shield(tools) or None,
        )

        at = len(before) + 1
        if found is None or tuple(found.token_ids[:at]) != before + end:
            return None
        return _segments(found.token_ids[at:], found.message_indices[at:])

    def parse(self, ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Any]) -> Parsed:
        """Read the message that the policy sampled as ``ids``.

        Tool calls are read only if ``tools`` are offered.
        """
        ended = len(ids) > 0 and ids[-1] in self.stop
        text = self.tokenizer.decode(ids[:-1] if ended else ids)
        said = self.inner.parse_response(
            list(ids), tools=list(tools) or None, prompt_ids=list(prompt)
        )

        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.content,
        }
        if said.reasoning_content:
            message["reasoning_content"] = said.reasoning_content
        if not said.tool_calls:
            return Parsed(message)
        if not tools:
            return Parsed(message | {"content": text})

        wrong = [call for call in said.tool_calls if call.status not in READ]
        wrong += [call for call in said.tool_calls if not isinstance(call.arguments, dict)]
        if wrong:
            why = f"a tool call cannot be read ({wrong[0].status}): {wrong[0].raw[:40]!r}"
            return Parsed(message | {"content": text}, why)
        made = [
            called(
                (len(prompt), index, *ids),
                call.name,
                call.arguments,
            )
            for index, call in enumerate(said.tool_calls)
        ]
        return Parsed(message | {"tool_calls": made})

    def _given(self, messages: Sequence[Message]) -> list[Any]:
        return [self.tokenizer.shield(tidy(message)) for message in messages]


def _named(new: Sequence[Message], calls: Sequence[Any]) -> list[Message]:
    """Name the tool of each result: by its id, or in the order of the calls."""
    by_id = {call["id"]: call for call in calls if call.get("id")}
    left = list(calls)
    made: list[Message] = []

    for message in new:
        if message["role"] == "tool":
            call = by_id.get(message.get("tool_call_id") or "", left[0])
            left.remove(call) if call in left else None
            message = {**message, "name": call["function"]["name"]}
        made.append(message)
    return made


def _segments(ids: Sequence[int], owners: Sequence[int]) -> tuple[Segment, ...]:
    """Divide ids into those of a message and those between messages.

    Args:
        owners: the number of its message for each id, or -1.
    """
    made, at = [], 0
    for between, run in groupby(owner < 0 for owner in owners):
        size = len(list(run))
        origin = Origin.GLUE if between else Origin.OBSERVATION
        made.append(Segment(tuple(ids[at : at + size]), origin))
        at += size
    return tuple(made)
