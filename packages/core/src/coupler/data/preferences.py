"""Encode rows of preferences: pairs of completions, and completions with a label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.trajectory import Origin, Segment, Trajectory, columns_of
from coupler.data.columns import Columns
from coupler.data.dataset import Messages, Row
from coupler.data.examples import imitated
from coupler.data.options import DataConfig
from coupler.data.prompts import Limit, Prompt, encode_prompts, of_model, short_enough
from coupler.data.templates import Codec
from coupler.errors import CouplerError, DataError

CHOSEN, REJECTED, MARGIN = "chosen", "rejected", "margin"
COMPLETION, LABEL = "completion", "label"
# The most tokens of a row where nothing limits them.
UNLIMITED = 2**31


class PreferenceColumns(Columns):
    """Renames columns of preferences. They have no answer.

    Without a prompt, it is what both conversations begin with.
    """

    def __init__(self, config: DataConfig, key: str) -> None:
        super().__init__(config, key)
        own = {name: config.columns.get(name, name) for name in self.needed}

        self.mapped = {
            **self.mapped,
            **own,
            "answer": "",
        }
        self.given = {
            **config.columns,
            **own,
        }
        self.others = list(dict.fromkeys([*self.others, *self.needed]))
        self.lost = self.others

    def take(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the value of the column that becomes ``name``, or None."""
        found = super().take(row, name)
        if found is None and name == "prompt" and REJECTED in self.needed:
            return shared_prompt(
                super().take(row, CHOSEN),
                super().take(row, REJECTED),
            )
        return found


class PairColumns(PreferenceColumns):
    """Renames the columns of pairs: ``prompt``, ``chosen`` and ``rejected``."""

    needed = (CHOSEN, REJECTED)


class LabelColumns(PreferenceColumns):
    """Renames the columns of KTO: ``prompt``, ``completion`` and ``label``."""

    needed = (COMPLETION, LABEL)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two completions of one prompt, of which one is preferred."""

    chosen: Trajectory
    rejected: Trajectory
    margin: float = 0.0

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def longest(self) -> int:
        """Return the tokens of the longer row."""
        return max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True, slots=True)
class Labelled:
    """A completion that is desirable or not.

    Attributes:
        room: the most tokens of a prompt with a completion.
    """

    trajectory: Trajectory
    desirable: bool
    room: int

    def __len__(self) -> int:
        return len(self.trajectory)


def shared_prompt(chosen: Any, rejected: Any) -> list[Any] | None:
    """Return the messages that two conversations begin with, or None without any.

    Each of them keeps a message of its own.
    """
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        return None
    number = 0
    while number < min(len(chosen), len(rejected)) - 1 and chosen[number] == rejected[number]:
        number += 1
    return chosen[:number] or None


def pairs(
    rows: Iterable[Row],
    codec: Codec,
    config: DataConfig,
    room: Limit | None = None,
    *,
    scored: bool = False,
) -> tuple[list[tuple[Row, Pair]], int]:
    """Encode pairs, and return those that are short enough, each with its row, and how
    many others were dropped.

    Args:
        room: the engine's limit for a pair, whose rows stay in one micro-batch.
        scored: encode whole conversations for a reward model, in place of prompts with
            completions.

    Raises:
        DataError: a row lacks a completion or has an odd one, or is too long.
    """
    prompts, dropped = encode_prompts(rows, codec, config)
    encode = _conversation if scored else _completed
    made: list[tuple[Row, Pair]] = []

    for prompt in prompts:
        sides = (
            encode(
                prompt,
                _completion(prompt, name, config),
                codec,
                config,
            )
            for name in (CHOSEN, REJECTED)
        )
        pair = Pair(*sides, margin=_margin(prompt.row, config))
        made.append((prompt.row, pair))

    longest = [(row, pair.longest) for row, pair in made]
    made, more = _within(made, longest, codec, config)
    whole = [(row, len(pair)) for row, pair in made]
    kept, most = short_enough(
        made,
        whole,
        "pairs",
        [room] if room else [],
        config,
        "data",
    )
    return kept, dropped + more + most


def labelled(
    rows: Iterable[Row], codec: Codec, config: DataConfig, room: Limit | None = None
) -> tuple[list[tuple[Row, Labelled]], int]:
    """Encode completions with their labels, as :func:`pairs` does.

    Args:
        room: the engine's limit for a prompt with its completion.
    """
    prompts, dropped = encode_prompts(rows, codec, config)
    limits = [room] if room else []
    tokens = [limit.tokens for limit in limits] + [codec.max_positions or UNLIMITED]
    made: list[tuple[Row, Labelled]] = []

    for prompt in prompts:
        trajectory = _completed(
            prompt,
            _completion(prompt, COMPLETION, config),
            codec,
            config,
        )
        label = _label(prompt.row, config)
        made.append((prompt.row, Labelled(trajectory, label, min(tokens))))

    sizes = [(row, len(one)) for row, one in made]
    kept, more = _within(
        made,
        sizes,
        codec,
        config,
        *limits,
    )
    return kept, dropped + more


def _within(
    made: list[Any],
    sizes: list[tuple[Row, int]],
    codec: Codec,
    config: DataConfig,
    *limits: Limit,
) -> tuple[list[Any], int]:
    """Leave out rows that are too long for the model, or for one of ``limits``."""
    if positions := codec.max_positions:
        use = "for a prompt with its completion"
        limits = (*limits, of_model(positions, positions, use))
    return short_enough(
        made,
        sizes,
        "rows",
        list(limits),
        config,
        "data",
    )


def _completed(
    prompt: Prompt,
    text: str,
    codec: Codec,
    config: DataConfig,
) -> Trajectory:
    """Return a prompt with a completion to learn from."""
    return imitated(
        replace(prompt.row, answer=text),
        codec,
        config,
    )


def _conversation(
    prompt: Prompt,
    text: str,
    codec: Codec,
    config: DataConfig,
) -> Trajectory:
    """Return a conversation as :class:`~coupler.rewards.reward_model.RewardModel` asks
    for its score: at the last token that is not padding, which one more token follows.
    """
    try:
        said = {"role": "assistant", "content": text}
        ids = codec.conversation_ids((*prompt.messages, said))
    except CouplerError as error:
        raise DataError(f"{prompt.row.place(config.named)}: {error}") from None
    while ids and ids[-1] == codec.padding:
        ids = ids[:-1]
    if not ids:
        raise DataError(f"{prompt.row.place(config.named)} has no tokens under this tokenizer.")

    whole = Segment(ids, Origin.PROMPT)
    after = Segment(ids[-1:], Origin.TARGET)
    return Trajectory((whole, after))


def _completion(
    prompt: Prompt,
    name: str,
    config: DataConfig,
) -> str:
    """Return the text of a completion: a text, or what follows the prompt's messages.

    Raises:
        DataError: it is empty, or no text of the assistant.
    """
    row = prompt.row
    found = row.extra[name]
    messages = found if isinstance(found, list) else [{"role": "assistant", "content": found}]

    asked = _as_messages(row.prompt)
    if len(messages) > len(asked) and [_whole(m) for m in messages[: len(asked)]] == asked:
        messages = messages[len(asked) :]
    match messages:
        case [{"role": "assistant", "content": str() as text, **more}] if not more.get(
            "tool_calls"
        ):
            if text:
                return text
            raise DataError(f"{row.place(config.named)}: {name!r} is empty.")
    raise DataError(
        f"{row.place(config.named)}: {name!r} must be a text, or the prompt's messages and one "
        f"more of the assistant, which has text alone; it is {found!r:.80}."
    )


def _as_messages(prompt: str | Messages) -> list[Any]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [_whole(message) for message in prompt]


def _whole(message: Any) -> Any:
    """Return a message as rows hold it: one that calls tools may lack a content."""
    return {"content": "", **message} if isinstance(message, Mapping) else message


def _margin(row: Row, config: DataConfig) -> float:
    found = row.extra.get(MARGIN, 0.0)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise DataError(
            f"{row.place(config.named)}: {MARGIN!r} must be a number, got {found!r:.80}."
        )
    return float(found)


def _label(row: Row, config: DataConfig) -> bool:
    found = row.extra[LABEL]
    if found not in (True, False):
        raise DataError(
            f"{row.place(config.named)}: {LABEL!r} must be true or false, got {found!r:.80}."
        )
    return bool(found)


def pack_pairs(examples: Sequence[Pair]) -> Batch:
    """Make one Batch of pairs. The rows of a pair are one unit and one trajectory."""
    rows: list[Trajectory] = []
    for pair in examples:
        rows += [pair.chosen, pair.rejected]
    numbers = np.repeat(np.arange(len(examples), dtype=np.int64), 2)
    margins = np.array([pair.margin for pair in examples], np.float32)

    return _packed(
        rows,
        unit=numbers,
        trajectory=numbers,
        chosen=np.tile([True, False], len(examples)),
        margin=np.repeat(margins, 2),
    )


def pack_labelled(examples: Sequence[Labelled]) -> Batch:
    """Make one Batch of labelled rows, and of as many with the completion of another.

    A mismatched row joins a prompt with the completion of the next row that has another
    prompt and fits. Where there is none, it is left out.
    """
    rows = [one.trajectory for one in examples]
    desirable = [one.desirable for one in examples]
    for at in range(len(examples)):
        if mismatched := _mate(examples, at):
            rows.append(mismatched)
            desirable.append(False)

    return _packed(
        rows,
        unit=np.arange(len(rows), dtype=np.int64),
        desirable=np.array(desirable),
        mismatched=np.arange(len(rows)) >= len(examples),
    )


def _mate(examples: Sequence[Labelled], at: int) -> Trajectory | None:
    prompt, _ = examples[at].trajectory.segments
    for step in range(1, len(examples)):
        next_one = examples[(at + step) % len(examples)]
        other, completion = next_one.trajectory.segments
        size = len(prompt.ids) + len(completion.ids)
        if other != prompt and size <= examples[at].room:
            return Trajectory((prompt, completion))
    return None


def _packed(rows: Sequence[Trajectory], **seqs: np.ndarray) -> Batch:
    columns = columns_of(rows)
    return Batch(
        lengths=np.array([len(row) for row in rows], np.int64),
        tokens={name: columns[name] for name in ("tokens", "loss_mask")},
        seqs=seqs,
    )
