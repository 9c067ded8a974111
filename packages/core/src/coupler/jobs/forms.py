"""Choose how rows of supervised training are encoded and packed.

The capabilities of an algorithm name the form of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from coupler.batch import Batch
from coupler.config.schema import RunConfig
from coupler.conversation.taught import Conversations
from coupler.data import Codec, Row, examples
from coupler.data.options import DataConfig
from coupler.data.preferences import labelled, pack_labelled, pack_pairs, pairs
from coupler.data.prompts import Limit
from coupler.jobs.sft_trainer import pack
from coupler.plugins.manager import Plugins
from coupler.run.plan_checks import micro_batch_room
from coupler.run.row_form import LABELS, PAIRS, SCORES, capabilities

# The most tokens of a row where the engine sets no limit.
UNLIMITED = 2**31


# Examples with their rows, the number of rows that were dropped, and warnings.
Encoded = tuple[list[tuple[Row, Any]], int, list[str]]


@dataclass(frozen=True, slots=True)
class Form:
    """The steps from rows to a batch.

    Attributes:
        encode: makes examples of rows, as :func:`answers` does.
        pack: makes a Batch of such examples.
        validates: whether the loss on held-out rows can be measured.
    """

    encode: Callable[..., Encoded]
    pack: Callable[[Sequence[Any]], Batch]
    validates: bool = False


def form_of(config: RunConfig, plugins: Plugins) -> Form:
    """Return the form of rows that the algorithm of ``config`` trains on."""
    able = capabilities(config, plugins)
    if PAIRS in able:
        return Form(
            partial(_preferences, partial(pairs, scored=SCORES in able)),
            pack_pairs,
        )
    if LABELS in able:
        room = micro_batch_room(config.engine, "engine") if config.engine else None
        limit = room.tokens if room else UNLIMITED
        return Form(
            partial(_preferences, labelled),
            partial(pack_labelled, room=limit),
        )
    return Form(answers, pack, validates=True)


def answers(
    rows: Sequence[Row], codec: Codec, config: DataConfig, room: Limit | None, key: str
) -> Encoded:
    """Encode prompts with their answers, and conversations.

    Args:
        room: the engine's limit for an example.
        key: the section of the configuration that ``config`` is, for messages.
    """
    told = any(row.is_conversation for row in rows)
    converse = Conversations(codec, config) if told else None
    kept, dropped = examples(rows, codec, config, room, key, converse)

    warnings: list[str] = []
    if converse and converse.unshown:
        warnings.append(
            f"the chat template of {codec.folder} shows no reasoning of {converse.unshown} "
            "answers, which is not trained"
        )
    return [(example.row, example) for example in kept], dropped, warnings


def _preferences(
    encode: Callable[..., tuple[list[tuple[Row, Any]], int]],
    rows: Sequence[Row],
    codec: Codec,
    config: DataConfig,
    room: Limit | None,
    _key: str,
) -> Encoded:
    kept, dropped = encode(rows, codec, config, room)
    return kept, dropped, []
