"""Encode prompts for the policy, and keep those within their limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from coupler.data.dataset import Row
from coupler.data.options import DataConfig, Truncation
from coupler.data.templates import Codec, messages_of
from coupler.errors import CouplerError, DataError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row with its prompt as token ids.

    Attributes:
        messages: the prompt, after the system prompt where there is one.
    """

    row: Row
    ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    """A largest number of tokens, with the words for a message."""

    tokens: int
    name: str  # the option or the model that sets it
    fix: str  # the option to set, where "{}" stands for a number that fits all
    ranks: int = 1  # processes that hold a part of the sequence each


def encode_prompts(
    rows: Iterable[Row], codec: Codec, config: DataConfig, key: str = "data"
) -> tuple[list[Prompt], int]:
    """Encode every row's prompt. Return those that are short enough, and how many were
    dropped.

    A prompt may have ``config.max_prompt_tokens``, and must leave the model a position
    for a completion.

    Raises:
        DataError: a prompt is too long and ``config.drop_overlong`` is false, all are,
            or one cannot be rendered.
    """
    if config.truncation not in (Truncation.ERROR, Truncation.DROP):
        raise DataError(
            f"{key}.truncation={config.truncation} is of supervised training: a prompt that is "
            f"sampled from is never cut.\n  try:  {key}.truncation=drop"
        )
    prompts = [
        Prompt(row, _ids(row, codec, config), messages_of(row.prompt, config.system_prompt))
        for row in rows
    ]

    option = f"{key}.max_prompt_tokens="
    limits = [
        Limit(config.max_prompt_tokens, f"{option}{config.max_prompt_tokens}", f"{option}{{}}")
    ]
    if positions := codec.max_positions:
        limits.append(of_model(positions, positions - 1, "one of them for a completion"))
    return short_enough(
        prompts, [(p.row, len(p.ids)) for p in prompts], "prompts", limits, config, key
    )


def of_model(positions: int, tokens: int, use: str) -> Limit:
    """Return the limit of a model with so many positions, for a message."""
    name = f"{tokens} tokens, for the model has {positions} positions, {use}"
    return Limit(tokens, name, "a model with more max_position_embeddings in its config.json")


def short_enough(
    items: list[T],
    sizes: list[tuple[Row, int]],
    noun: str,
    limits: list[Limit],
    config: DataConfig,
    key: str,
) -> tuple[list[T], int]:
    """Return those of ``items`` within every limit, and the number of others.

    Args:
        sizes: the row of each item, and its number of tokens.

    Raises:
        DataError: some are too long and are not to be dropped, or all are.
    """
    drops = config.drops  # always read, or it would count as unused
    if not limits:
        return items, 0

    limit = min(limits, key=lambda each: each.tokens)
    overlong = [(row, size) for row, size in sizes if size > limit.tokens]
    if overlong and (not drops or len(overlong) == len(items)):
        (first, size), longest = overlong[0], max(size for _, size in overlong)
        drop = "" if drops else f", or {key}.drop_overlong=true"
        raise DataError(
            f"{len(overlong)} of {len(items)} {noun} are longer than {limit.name}; "
            f"the first is {first.place(config.named)} with {size} tokens.\n"
            f"  try:  {limit.fix.format(-(-longest // limit.ranks))}{drop}"
        )

    kept = [item for item, (_, size) in zip(items, sizes, strict=True) if size <= limit.tokens]
    return kept, len(overlong)


def _ids(row: Row, codec: Codec, config: DataConfig) -> tuple[int, ...]:
    where = row.place(config.named)
    try:
        ids = codec.prompt_ids(
            row.prompt,
            config.system_prompt,
            tools=row.tools,
            control_tokens=config.control_tokens,
        )
    except CouplerError as error:
        raise DataError(f"{where}: {error}") from None
    if not ids:
        raise DataError(f"{where}: {config.prompt_column!r} has no tokens under this tokenizer.")
    return ids
