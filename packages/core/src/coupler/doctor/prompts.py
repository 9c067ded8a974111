"""Look at prompts as token ids: their lengths, and how the chat template shows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from coupler.data import Codec, Row
from coupler.data.dataset import Messages
from coupler.data.options import DataConfig
from coupler.data.templates import MARK, messages_of
from coupler.doctor.spotted import Spotted
from coupler.errors import CouplerError
from coupler.plugins.finding import Finding, ok, problem, warning

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(slots=True)
class Encoded:
    """Prompts of a section as token ids, and what was noticed on the way."""

    key: str
    config: DataConfig
    codec: Codec
    rows: list[Row] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    ids: list[tuple[int, ...]] = field(default_factory=list)
    total: int = 0

    refused: Spotted = field(default_factory=Spotted)
    control: Spotted = field(default_factory=Spotted)
    roles: dict[tuple[str, ...], list[str]] = field(default_factory=dict)  # -> places

    def add(self, row: Row, place: str) -> None:
        """Encode the prompt of a row, and note what it holds."""
        self.total += 1
        config = self.config
        try:
            messages = messages_of(row.prompt, config.system_prompt)
            ids = self.codec.prompt_ids(
                row.prompt,
                config.system_prompt,
                tools=row.tools,
                control_tokens=config.control_tokens,
            )
        except CouplerError as error:
            self.refused.add(place, error)
            return
        if not ids:
            self.refused.add(place, CouplerError("it has no tokens under this tokenizer"))
            return

        self.rows.append(row)
        self.places.append(place)
        self.ids.append(ids)
        roles = tuple(message["role"] for message in messages)
        self.roles.setdefault(roles, []).append(place)
        self._look_for_control(row, messages, place)

    def _look_for_control(self, row: Row, messages: Messages, place: str) -> None:
        texts = [message["content"] for message in messages]
        text = "\n".join([*texts, row.answer])
        for token in self.codec.control_texts:
            if token in text:
                self.control.add(place, f"it holds {token}")
                return

    @property
    def limit(self) -> int:
        """The longest prompt that the run takes."""
        limit = self.config.max_prompt_tokens
        if self.codec.max_positions:
            return min(limit, self.codec.max_positions - 1)
        return limit

    def fitting(self) -> Iterator[tuple[Row, tuple[int, ...]]]:
        """Yield the rows that are short enough, with their ids."""
        for row, ids in zip(self.rows, self.ids, strict=True):
            if len(ids) <= self.limit:
                yield row, ids


def prompt_findings(encoded: Encoded) -> Iterator[Finding]:
    """Yield what was found in the prompts of one section."""
    key = encoded.key
    yield from encoded.refused.problems(key, encoded.total)
    if not encoded.ids:
        return

    yield from _lengths(encoded)
    yield from _roles(encoded)
    yield from _tools(encoded)
    how = "as such" if encoded.config.control_tokens else "as plain characters"
    what = f"texts of control tokens, encoded {how} ({key}.control_tokens)"
    yield from encoded.control.warnings(key, encoded.total, what)


def _lengths(encoded: Encoded) -> Iterator[Finding]:
    key, config, limit = encoded.key, encoded.config, encoded.limit
    sizes = np.array([len(ids) for ids in encoded.ids])
    p50, p99 = np.percentile(sizes, [50, 99], method="higher")
    yield ok(key, f"prompts have {sizes.min()} to {sizes.max()} tokens, median {p50}, p99 {p99}")

    over = np.flatnonzero(sizes > limit)
    if not len(over):
        return
    first = encoded.places[over[0]]
    text = (
        f"{len(over)} of {len(sizes)} prompts are longer than {limit} tokens; the first is "
        f"{first} with {sizes[over[0]]}"
    )
    if config.drop_overlong and len(over) < len(sizes):
        yield warning(key, f"{text}; they are left out")
    else:
        yield problem(
            key, text, f"{key}.max_prompt_tokens={sizes.max()}, or {key}.drop_overlong=true"
        )


def _roles(encoded: Encoded) -> Iterator[Finding]:
    """Judge each order of roles once, for there are few."""
    faults = {"": Spotted()}
    for roles, places in encoded.roles.items():
        for what in _faults_of(roles, encoded.codec):
            for place in places:
                faults.setdefault(what, Spotted()).add(place, f"its roles are {', '.join(roles)}")
    for what, found in faults.items():
        yield from found.warnings(encoded.key, encoded.total, what)


def _faults_of(roles: tuple[str, ...], codec: Codec) -> Iterator[str]:
    if unknown := [role for role in roles if role not in ROLES]:
        yield f"a role {unknown[0]!r}, which is none of {', '.join(ROLES)}"
    if "system" in roles[1:]:
        yield "system messages that are not the first"
    if roles[-1] == "assistant":
        yield "prompts that end with a message of the assistant, and another one is sampled"
    if any(one == other == "user" for one, other in pairwise(roles)):
        yield "two messages of the user in a row"

    # A template may pass over a message in silence.
    probe = tuple({"role": role, "content": MARK} for role in roles)
    try:
        shown = codec.decode(codec.prompt_ids(probe, "")).count(MARK)
    except CouplerError:
        return
    plain = codec.decode(codec.prompt_ids(MARK, "")).count(MARK)
    if plain == 1 and shown < len(roles):
        yield f"messages that the chat template leaves out ({shown} of {len(roles)} are shown)"


def _tools(encoded: Encoded) -> Iterator[Finding]:
    """Find rows with tools that the chat template cannot show."""
    template = encoded.codec.tokenizer.chat_template or ""
    texts = template.values() if isinstance(template, dict) else [template]
    if any("tools" in text for text in texts):
        return
    found = Spotted()
    for row, place in zip(encoded.rows, encoded.places, strict=True):
        if row.tools:
            found.add(place, "it has a column 'tools'")
    what = "tools, of which the chat template knows none (environment.calls=text shows them)"
    yield from found.warnings(encoded.key, encoded.total, what)
