"""Rows as the policy sees them: prompts within their limit, and supervised trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coupler.config.schema import DataConfig
from coupler.data.dataset import Row
from coupler.data.templates import Codec
from coupler.errors import CouplerError, DataError
from coupler.trajectory import Origin, Segment, Trajectory


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row with its prompt as token ids."""

    row: Row
    ids: tuple[int, ...]


def encode_prompts(
    rows: Iterable[Row], codec: Codec, config: DataConfig, key: str = "data"
) -> tuple[list[Prompt], int]:
    """Encode every row's prompt; return those within ``config.max_prompt_tokens`` and how many were dropped.

    Raises:
        DataError: a prompt is too long and ``config.drop_overlong`` is false, all are, or one cannot be rendered.
    """
    prompts = [Prompt(row, _ids(row, codec, config)) for row in rows]
    limit, drops = config.max_prompt_tokens, config.drop_overlong  # read whether a prompt is too long or not
    overlong = [p for p in prompts if len(p.ids) > limit]
    if not overlong:
        return prompts, 0
    first, longest = overlong[0], max(len(p.ids) for p in overlong)
    found = (
        f"{len(overlong)} of {len(prompts)} prompts are longer than {key}.max_prompt_tokens={limit}; "
        f"the first is row {first.row.index} (from 0) of {config.source} with {len(first.ids)} tokens."
    )
    if len(overlong) == len(prompts) or not drops:
        drop = "" if drops else f", or {key}.drop_overlong=true"
        raise DataError(f"{found}\n  try:  {key}.max_prompt_tokens={longest}{drop}")
    return [p for p in prompts if len(p.ids) <= limit], len(overlong)


def supervised(rows: Iterable[Row], codec: Codec, config: DataConfig) -> tuple[list[Trajectory], int]:
    """Turn rows into prompt and target segments; return them and how many overlong prompts were dropped.

    Raises:
        DataError: a row has no answer, or as :func:`encode_prompts`.
    """
    prompts, dropped = encode_prompts(rows, codec, config)
    return [_imitate(p, codec, config) for p in prompts], dropped


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
