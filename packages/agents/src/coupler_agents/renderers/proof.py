"""Prove a renderer of the library for one model, against its chat template.

The library was written for the templates of known models. The template of a folder may
be another one, so three things are compared before a run starts: first prompts with the
template, a turn and what follows it with the template, and the extended conversation
with a rendering from the beginning. Calls and answers are then read back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coupler.conversation import Message
from coupler.conversation.bridge import Case
from coupler.conversation.messages import became, canonical
from coupler.conversation.reading import NAME, REASONS, TOOL, USER, call
from coupler.errors import CouplerError

if TYPE_CHECKING:
    from coupler_agents.renderers.renderer import LibraryRenderer

Ids = tuple[int, ...]
SYSTEM = {"role": "system", "content": "coupler rules"}
SAID = {"role": "assistant", "content": "coupler says"}
REQUIRED = (Case.USER, Case.TOOL, Case.TOOLS)
CONTROLS = 8  # control tokens that are tried as text


class Unproved(CouplerError):
    """The library does not do what the model's chat template does."""


def prove(renderer: LibraryRenderer) -> dict[Case, int]:
    """Return the cases of messages that may follow a turn, with the id that ends it.

    Raises:
        CouplerError: it is not exact for what a conversation needs.
    """
    proofs = [Proof(renderer, [])]
    if renderer.tools:
        proofs.append(Proof(renderer, [TOOL]))
    for proof in proofs:
        proof.prompts()

    proved: dict[Case, int] = {}
    for case in Case if renderer.tools else (Case.USER,):
        try:
            proved[case] = proofs[-1].turn(case)
        except CouplerError:
            if case in REQUIRED:
                raise
    return proved


class Proof:
    """Compares a renderer with the chat template where these tools are offered."""

    def __init__(self, renderer: LibraryRenderer, tools: Sequence[Any]) -> None:
        self.renderer, self.tools = renderer, tools
        try:
            self.by_template([SYSTEM, USER])
            self.start: list[Mapping[str, Any]] = [SYSTEM, USER]
        except CouplerError:  # the template takes no system prompt
            self.start = [USER]

    def prompts(self) -> None:
        """Compare first prompts with the template.

        Raises:
            CouplerError: they differ, or one side refuses them.
        """
        texts = sorted(self.renderer.codec.control_texts)[:CONTROLS]
        control = {"role": "user", "content": " ".join(["x", *texts])}

        for messages in ([USER], [control], self.start):
            expected = self.by_template(messages)
            self.same(
                "a prompt",
                expected,
                self.renderer.render(messages, self.tools),
            )

    def turn(self, case: Case) -> int:
        """Compare a turn and what follows it, and return the id that ends the turn.

        Raises:
            CouplerError: they differ, or one side refuses them.
        """
        calls = [call(index) for index in range(case.calls)]
        answer = SAID
        if calls:
            answer = {**SAID, "content": "", "tool_calls": calls}
        messages = [*self.start, answer, *case.messages]

        prompt = self.renderer.render(self.start, self.tools)
        whole = self.renderer.render(messages, self.tools)
        turn = self.turn_of(prompt, whole)
        if not turn:
            raise Unproved(f"its rendering shows no turn before {case}")
        added = self.appended((*prompt, *turn), case)
        self.same(
            case,
            whole,
            prompt + turn + added,
        )

        theirs = self.by_template(messages)
        self.same(
            case,
            theirs[-len(turn + added) :],
            turn + added,
        )
        self.shows(added, case)
        self.reasoning(
            {**answer, "reasoning_content": REASONS},
            prompt,
            added,
            case,
        )
        self.reading(
            turn,
            prompt,
            calls,
        )
        return turn[-1]

    def reasoning(self, answer: Message, prompt: Ids, added: Ids, case: Case) -> None:
        """Compare what follows the turn with reasoning, if the library writes any."""
        messages = [*self.start, answer]
        shown = self.renderer.render(
            messages,
            self.tools,
            generate=False,
        )
        turn = self.turn_of(prompt, shown)

        if turn:
            self.same(
                case,
                added,
                self.appended((*prompt, *turn), case),
            )

    def reading(self, turn: Ids, prompt: Ids, calls: Sequence[Any]) -> None:
        """Read a turn back."""
        parsed = self.renderer.parse(
            turn,
            prompt,
            self.tools,
        )
        found = [each["function"] for each in parsed.message.get("tool_calls", [])]
        read = [canonical([each["name"], json.loads(each["arguments"])]) for each in found]
        wanted = [canonical([NAME, each["function"]["arguments"]]) for each in calls]

        if parsed.malformed or read != wanted:
            raise Unproved("its own tool call is read as something else")
        if not calls and parsed.message["content"] != SAID["content"]:
            raise Unproved("its own answer is read as something else")

    def turn_of(self, prompt: Ids, rendered: Ids) -> Ids:
        """Return the ids of the turn behind a prompt, or none without a turn."""
        rest = rendered[len(prompt) :]
        ends = [at for at, id in enumerate(rest) if id in self.renderer.stop]
        return rest[: ends[0] + 1] if ends and rendered[: len(prompt)] == prompt else ()

    def appended(self, ids: Ids, case: Case) -> Ids:
        """Return what the library appends."""
        added = self.renderer.append(
            ids,
            case.messages,
            self.tools,
        )
        if added is None:
            raise Unproved(f"the library does not append {case} to a turn")
        return tuple(id for segment in added for id in segment.ids)

    def shows(self, ids: Ids, case: Case) -> None:
        """Look for the texts of the messages that were appended."""
        shown = self.renderer.tokenizer.decode(ids)
        for message in case.messages:
            if message["content"] not in shown:
                raise Unproved(f"it does not show {message['content']!r} of {case}")

    def by_template(self, messages: Sequence[Mapping[str, Any]]) -> Ids:
        """Return the ids of the model's own chat template."""
        given = tuple(dict(message) for message in messages)
        return self.renderer.codec.prompt_ids(
            given,
            "",
            tools=self.tools,
        )

    def same(self, what: str, expected: Ids, found: Ids) -> None:
        """Compare ids."""
        if expected == found:
            return
        texts = (self.renderer.tokenizer.decode(ids) for ids in (expected, found))
        raise Unproved(f"it writes {what} otherwise than the chat template: {became(*texts)}")
