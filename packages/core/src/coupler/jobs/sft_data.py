"""Load the examples of supervised training, and of its validation."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from coupler.config.schema import DataConfig
from coupler.conversation.taught import Conversations
from coupler.data import Example, Row, examples, load_rows
from coupler.errors import ConfigError
from coupler.jobs.build import Builder
from coupler.run.plan import with_steps
from coupler.run.plan_checks import micro_batch_room
from coupler.system.log import PLAIN, get_logger

log = get_logger(__name__)


class Section:
    """The rows of ``data`` or ``eval.data``, loaded when they are asked for."""

    def __init__(self, builder: Builder, config: DataConfig, key: str) -> None:
        self.builder, self.config, self.key = builder, config, key

    @cached_property
    def rows(self) -> list[Row]:
        """The rows as they come from their source."""
        return load_rows(self.config, self.key, conversations=True)

    @cached_property
    def examples(self) -> list[Example]:
        """The examples of the rows, without those that were dropped."""
        codec = self.builder.codec
        told = any(row.is_conversation for row in self.rows)
        converse = Conversations(codec, self.config) if told else None
        kept, dropped = examples(
            self.rows,
            codec,
            self.config,
            micro_batch_room(self.builder.config.engine, "engine"),
            self.key,
            converse,
        )

        if dropped:
            log.info(f"{self.key}: dropped {dropped} rows that are too long", extra=PLAIN)
        if converse and converse.unshown:
            log.warning(
                f"{self.key}: the chat template of {codec.folder} shows no reasoning of "
                f"{converse.unshown} answers, which is not trained"
            )
        return kept


def in_epochs(builder: Builder, data: Section) -> Builder:
    """Return a builder whose ``steps`` are those that ``epochs`` amounts to.

    Raises:
        ConfigError: ``steps`` is set beside it, to another number.
    """
    composed = builder.composed
    config = with_steps(composed.config, len(data.examples))
    given = composed.config.steps
    if "steps" in composed.set_keys and given != config.steps:
        raise ConfigError(
            f"epochs={config.epochs:g} is {config.steps} steps of prompts_per_step="
            f"{config.prompts_per_step} over {len(data.examples)} rows, and steps={given} is set, "
            "too.\n  try:  leaving one of them out"
        )

    made = Builder(replace(composed, config=config), builder.plugins)
    made.codec = builder.codec
    made.reads.keys.update({*builder.reads.keys, "epochs", "steps"})
    return made
