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

from coupler.conversation.bridge import Case
from coupler.conversation.messages import became, canonical
from coupler.conversation.reading import NAME, TOOL, USER, call
from coupler.errors import CouplerError

if TYPE_CHECKING:
    from coupler_agents.renderers.renderer import LibraryRenderer

SYSTEM = {"role": "system", "content": "coupler rules"}
SAID = {"role": "assistant", "content": "coupler says"}
REQUIRED = (Case.USER, Case.TOOL, Case.TOOLS)


class Unproved(CouplerError):
    """The library does not do what the model's chat template does."""


def prove(renderer: LibraryRenderer) -> dict[Case, int]:
    """Return the cases of messages that may follow a turn, with the id that ends it.

    Raises:
        CouplerError: it is not exact for what a conversation needs.
    """
    tools: list[Any] = [TOOL] if renderer.tools else []
    proved: dict[Case, int] = {}

    for offered in ([], tools) if tools else ([],):
        _prove_prompts(renderer, offered)
    for case in Case if tools else (Case.USER,):
        try:
            proved[case] = _prove_turn(renderer, case, tools)
        except CouplerError:
            if case in REQUIRED:
                raise
    return proved


def _prove_prompts(renderer: LibraryRenderer, tools: Sequence[Any]) -> None:
    """Compare first prompts with the chat template."""
    control = " ".join(["x", *sorted(renderer.codec.control_texts)[:8]])
    prompts: list[list[Mapping[str, Any]]] = [
        [USER],
        [{"role": "user", "content": control}],
        [SYSTEM, USER],
    ]

    for messages in prompts:
        try:
            expected = renderer.codec.prompt_ids(messages, "", tools=tools)
        except CouplerError:
            if messages[0] is SYSTEM:  # the template takes no system prompt
                continue
            raise
        _same(renderer, "a prompt", expected, renderer.render(messages, tools))


def _prove_turn(renderer: LibraryRenderer, case: Case, tools: Sequence[Any]) -> int:
    """Compare a turn and what follows it with the template, and with a rendering from
    the beginning. Returns the id that ends the turn.
    """
    calls = [call(index) for index in range(case.calls)]
    answer = {**SAID, "content": "", "tool_calls": calls} if calls else SAID
    history, new = [SYSTEM, USER, answer], case.messages
    if not _takes_system(renderer):
        history = history[1:]

    prompt = renderer.render(history[:-1], tools)
    whole = renderer.render([*history, *new], tools)
    turn = _turn(renderer, prompt, whole, case)
    added = renderer.append((*prompt, *turn), new, tools)
    if added is None:
        raise Unproved(f"the library does not append {case} to a turn")

    tail = tuple(id for segment in added for id in segment.ids)
    shown = renderer.tokenizer.decode(tail)
    for message in new:
        if message["content"] not in shown:
            raise Unproved(f"it does not show {message['content']!r} of {case}")
    _same(renderer, case, whole, (*prompt, *turn, *tail))
    theirs = renderer.codec.prompt_ids([*history, *new], "", tools=tools)
    _same(renderer, case, theirs[-len(turn + tail) :], turn + tail)
    _prove_parsing(renderer, calls, turn, prompt, tools)
    return turn[-1]


def _turn(
    renderer: LibraryRenderer, prompt: tuple[int, ...], whole: tuple[int, ...], case: Case
) -> tuple[int, ...]:
    """Return the ids of the policy's turn, from a rendering of what follows it."""
    if whole[: len(prompt)] != prompt:
        raise Unproved(f"an answer changes the prompt before it (case: {case})")
    rest = whole[len(prompt) :]
    end = next((at for at, id in enumerate(rest) if id in renderer.stop), -1)
    if end < 0:
        raise Unproved(f"no token that ends a turn stands before {case}")
    return rest[: end + 1]


def _prove_parsing(
    renderer: LibraryRenderer,
    calls: Sequence[Any],
    turn: tuple[int, ...],
    prompt: tuple[int, ...],
    tools: Sequence[Any],
) -> None:
    parsed = renderer.parse(turn, prompt, tools)
    found = [each["function"] for each in parsed.message.get("tool_calls", [])]
    wanted = [each["function"] for each in calls]

    read = [canonical([each["name"], json.loads(each["arguments"])]) for each in found]
    if parsed.malformed or read != [canonical([NAME, each["arguments"]]) for each in wanted]:
        raise Unproved("its own tool call is read as something else")
    if not calls and parsed.message["content"] != SAID["content"]:
        raise Unproved("its own answer is read as something else")


def _takes_system(renderer: LibraryRenderer) -> bool:
    try:
        renderer.codec.prompt_ids([SYSTEM, USER], "")
    except CouplerError:
        return False
    return True


def _same(
    renderer: LibraryRenderer, what: str, expected: tuple[int, ...], found: tuple[int, ...]
) -> None:
    if expected == found:
        return
    texts = (renderer.tokenizer.decode(ids) for ids in (expected, found))
    raise Unproved(f"it writes {what} otherwise than the chat template: {became(*texts)}")
