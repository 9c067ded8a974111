"""Encode rows of supervised training: a prompt with its answer, or a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite

from coupler.batch.trajectory import TRAINED, Origin, Segment, Trajectory
from coupler.data.dataset import Row
from coupler.data.options import DataConfig, Truncation
from coupler.data.prompts import Limit, of_model, short_enough
from coupler.data.templates import Codec
from coupler.errors import CouplerError, DataError

WEIGHT = "weight"
CUTS = (Truncation.LEFT, Truncation.RIGHT, Truncation.MIDDLE)
# Turns a row that is a whole conversation into what it trains.
Converse = Callable[[Row], list[Trajectory]]


@dataclass(frozen=True, slots=True)
class Example:
    """A row as supervised training imitates it.

    Attributes:
        weight: multiplies the weight of its tokens in the loss.
    """

    row: Row
    trajectory: Trajectory
    weight: float = 1.0

    def __len__(self) -> int:
        return len(self.trajectory)


def supervised(
    rows: Iterable[Row], codec: Codec, config: DataConfig, room: Limit | None = None
) -> tuple[list[Trajectory], int]:
    """Turn rows into prompt and target segments. Return them, and how many overlong
    ones were dropped.

    Raises:
        DataError: as :func:`examples`.
    """
    kept, dropped = examples(list(rows), codec, config, room)
    return [example.trajectory for example in kept], dropped


def examples(
    rows: Sequence[Row],
    codec: Codec,
    config: DataConfig,
    room: Limit | None = None,
    key: str = "data",
    converse: Converse | None = None,
) -> tuple[list[Example], int]:
    """Turn rows into examples, in their order. Return them, and the number of rows that
    were dropped.

    A row that is too long is refused, dropped or cut, as ``config.truncation`` says.
    One without a token to imitate after a cut is dropped.

    Args:
        room: the engine's limit for an example.
        key: the section of the configuration that ``config`` is, for messages.
        converse: makes the examples of rows that are conversations.

    Raises:
        DataError: a row has no answer, a wrong weight, cannot be rendered, or is longer
            than the limits of ``config``, of the model or of the engine.
    """
    made = [
        Example(row, trajectory, _weight(row, config))
        for row in rows
        for trajectory in _trajectories(row, codec, config, converse)
    ]
    if config.truncation in CUTS:
        return _cut(made, codec, config, room, key)

    prompts = [e for e in made if not e.row.is_conversation]
    limit = Limit(
        config.max_prompt_tokens,
        f"{key}.max_prompt_tokens={config.max_prompt_tokens}",
        f"{key}.max_prompt_tokens={{}}",
    )
    sizes = [(e.row, len(e.trajectory.segments[0].ids)) for e in prompts]
    fitting, _ = short_enough(prompts, sizes, "prompts", [limit], config, key)
    short = {id(example) for example in fitting}
    left = [e for e in made if e.row.is_conversation or id(e) in short]

    sizes = [(example.row, len(example)) for example in left]
    kept, _ = short_enough(left, sizes, "rows", _limits(codec, config, room, key), config, key)
    return kept, len(made) - len(kept)


def _limits(codec: Codec, config: DataConfig, room: Limit | None, key: str) -> list[Limit]:
    """Return the limits for a whole example."""
    limits = [room] if room else []
    if own := config.max_tokens:
        limits.append(Limit(own, f"{key}.max_tokens={own}", f"{key}.max_tokens={{}}"))
    if positions := codec.max_positions:
        limits.append(of_model(positions, positions, "for a prompt with its answer"))
    return limits


def _cut(
    made: list[Example], codec: Codec, config: DataConfig, room: Limit | None, key: str
) -> tuple[list[Example], int]:
    """Cut examples to the smallest limit, and drop those with nothing to imitate."""
    limits = _limits(codec, config, room, key)
    if not limits:
        raise DataError(
            f"{key}.truncation={config.truncation} needs a limit: neither the model nor the "
            f"engine sets one.\n  try:  {key}.max_tokens=4096"
        )
    tokens = min(limit.tokens for limit in limits)
    cut = [replace(e, trajectory=truncated(e.trajectory, tokens, config.truncation)) for e in made]
    kept = [example for example in cut if _imitates(example.trajectory)]

    if not kept:
        raise DataError(
            f"{key}.truncation={config.truncation} leaves no token of an answer in "
            f"{tokens} tokens.\n  try:  another {key}.truncation"
        )
    return kept, len(made) - len(kept)


def truncated(trajectory: Trajectory, tokens: int, how: Truncation) -> Trajectory:
    """Return at most ``tokens`` tokens of a trajectory without log-probs.

    Nothing predicts the first token that stays, so that it is not trained.

    Args:
        how: the part that goes: left, right or middle. Of an odd number of tokens, the
            middle leaves one more at the beginning.
    """
    size = len(trajectory)
    if size <= tokens:
        return trajectory

    head = {Truncation.LEFT: 0, Truncation.RIGHT: tokens}.get(how, tokens - tokens // 2)
    tail = size - (tokens - head)
    whole = [(segment.origin, id) for segment in trajectory.segments for id in segment.ids]
    left = [*whole[:head], *whole[tail:]]
    if left[0][0] in TRAINED:
        left[0] = (Origin.PROMPT, left[0][1])

    parts = groupby(left, key=lambda pair: pair[0])
    return Trajectory(tuple(Segment(tuple(id for _, id in run), o) for o, run in parts))


def _imitates(trajectory: Trajectory) -> bool:
    return any(segment.origin in TRAINED for segment in trajectory.segments)


def _trajectories(
    row: Row, codec: Codec, config: DataConfig, converse: Converse | None
) -> list[Trajectory]:
    if converse and row.is_conversation:
        return converse(row)
    return [imitated(row, codec, config)]


def imitated(row: Row, codec: Codec, config: DataConfig) -> Trajectory:
    """Encode a prompt with the answer of its row as one text.

    Raises:
        DataError: the answer is empty, or they cannot be rendered.
    """
    where = row.place(config.named)
    if not row.answer:
        alone = isinstance(row.prompt, str)
        raise DataError(
            f"{where} has an empty answer: there is nothing to imitate.\n"
            "  try:  data.answer_key=COLUMN, the text to be learnt"
            if alone
            else f"{where} has no message of the assistant, and no answer: there is nothing to "
            "imitate.\n  try:  leaving the row out"
        )
    try:
        prompt, answer = codec.example_ids(
            row.prompt,
            row.answer,
            config.system_prompt,
            tools=row.tools,
            control_tokens=config.control_tokens,
        )
    except CouplerError as error:
        raise DataError(f"{where}: {error}") from None
    if not prompt:
        raise DataError(f"{where}: {config.prompt_column!r} has no tokens under this tokenizer.")
    return Trajectory((Segment(prompt, Origin.PROMPT), Segment(answer, Origin.TARGET)))


def _weight(row: Row, config: DataConfig) -> float:
    """Return the column ``weight`` of a row, 1 without one.

    Raises:
        DataError: it is no finite number from 0 on.
    """
    found = row.extra.get(WEIGHT, 1.0)
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if not number or not isfinite(found) or found < 0:
        raise DataError(
            f"{row.place(config.named)} has {WEIGHT}={found!r:.40}; it "
            "multiplies the loss of the row.\n  it may be:  a finite number from 0 on"
        )
    return float(found)
