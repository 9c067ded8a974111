"""Rows as the policy sees them: prompts within their limit, and supervised trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from coupler.batch.trajectory import Origin, Segment, Trajectory
from coupler.config.schema import DataConfig
from coupler.data.dataset import Row
from coupler.data.templates import Codec
from coupler.errors import CouplerError, DataError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row with its prompt as token ids."""

    row: Row
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """How long something may be, and what to say of what is longer."""

    tokens: int
    name: str  # what sets it, for a message
    fix: str  # what to set; "{}" stands for a number of tokens that fits all
    ranks: int = 1  # that hold a part each


def encode_prompts(
    rows: Iterable[Row], codec: Codec, config: DataConfig, key: str = "data"
) -> tuple[list[Prompt], int]:
    """Encode every row's prompt; return those that are short enough and how many were dropped.

    Short enough are ``config.max_prompt_tokens``, and what leaves the model a position for a completion.

    Raises:
        DataError: a prompt is too long and ``config.drop_overlong`` is false, all are, or one cannot be rendered.
    """
    prompts = [Prompt(row, _ids(row, codec, config)) for row in rows]
    option = f"{key}.max_prompt_tokens="
    limits = [Limit(config.max_prompt_tokens, f"{option}{config.max_prompt_tokens}", f"{option}{{}}")]
    if positions := codec.max_positions:
        limits.append(_of_model(positions, positions - 1, "one of them for a completion"))
    return _short_enough(prompts, [(p.row, len(p.ids)) for p in prompts], "prompts", limits, config, key)


def supervised(
    rows: Iterable[Row], codec: Codec, config: DataConfig, room: Limit | None = None
) -> tuple[list[Trajectory], int]:
    """Turn rows into prompt and target segments; return them and how many overlong ones were dropped.

    Args:
        room: of the engine, for a prompt with its target.

    Raises:
        DataError: a row has no answer, is longer than the model or the engine takes, or as :func:`encode_prompts`.
    """
    prompts, dropped = encode_prompts(rows, codec, config)
    made = [_imitate(p, codec, config) for p in prompts]
    limits = [room] if room else []
    if positions := codec.max_positions:
        limits.append(_of_model(positions, positions, "for a prompt with its answer"))
    sizes = [(p.row, len(t)) for p, t in zip(prompts, made, strict=True)]
    kept, more = _short_enough(made, sizes, "rows", limits, config, "data")
    return kept, dropped + more


def _of_model(positions: int, tokens: int, use: str) -> Limit:
    name = f"{tokens} tokens, for the model has {positions} positions, {use}"
    return Limit(tokens, name, "a model with more max_position_embeddings in its config.json")


def _short_enough(
    items: list[T], sizes: list[tuple[Row, int]], noun: str, limits: list[Limit], config: DataConfig, key: str
) -> tuple[list[T], int]:
    """Those of ``items`` within every limit, and the number of others."""
    drops = config.drop_overlong  # read whether one is too long or not
    if not limits:
        return items, 0
    limit = min(limits, key=lambda each: each.tokens)
    overlong = [(row, size) for row, size in sizes if size > limit.tokens]
    if overlong and (not drops or len(overlong) == len(items)):
        (first, size), longest = overlong[0], max(size for _, size in overlong)
        drop = "" if drops else f", or {key}.drop_overlong=true"
        raise DataError(
            f"{len(overlong)} of {len(items)} {noun} are longer than {limit.name}; "
            f"the first is row {first.index} (from 0) of {config.source} with {size} tokens.\n"
            f"  try:  {limit.fix.format(-(-longest // limit.ranks))}{drop}"
        )
    return [item for item, (_, size) in zip(items, sizes, strict=True) if size <= limit.tokens], len(overlong)


def _imitate(prompt: Prompt, codec: Codec, config: DataConfig) -> Trajectory:
    if not prompt.row.answer:
        raise DataError(
            f"row {prompt.row.index} (from 0) of {config.source} has an empty answer: there is nothing to imitate.\n"
            "  try:  data.answer_key=COLUMN, the text to be learnt"
        )
    target = Segment(codec.target_ids(prompt.row.answer), Origin.TARGET)
    return Trajectory((Segment(prompt.ids, Origin.PROMPT), target))


def _ids(row: Row, codec: Codec, config: DataConfig) -> tuple[int, ...]:
    try:
        return codec.prompt_ids(row.prompt, config.system_prompt)
    except CouplerError as error:
        raise DataError(f"row {row.index} (from 0) of {config.source}: {error}") from None
