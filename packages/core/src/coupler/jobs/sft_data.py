"""Load the examples of supervised training, and of its validation."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from coupler.config.schema import DataConfig, Job
from coupler.data import Row, load_rows
from coupler.errors import ConfigError
from coupler.jobs.build import Builder
from coupler.jobs.forms import form_of
from coupler.run.plan import with_steps
from coupler.run.plan_checks import micro_batch_room
from coupler.run.row_form import columns_of
from coupler.system.log import PLAIN, get_logger

log = get_logger(__name__)


class Section:
    """The rows of ``data`` or ``eval.data``, loaded when they are asked for."""

    def __init__(self, builder: Builder, config: DataConfig, key: str) -> None:
        self.builder, self.config, self.key = builder, config, key

    @cached_property
    def rows(self) -> list[Row]:
        """The rows as they come from their source."""
        builder = self.builder
        return load_rows(
            self.config,
            self.key,
            columns_of(builder.config, builder.plugins, Job.SFT, self.key),
        )

    @cached_property
    def _encoded(self) -> list[tuple[Row, Any]]:
        builder = self.builder
        kept, dropped, warnings = form_of(builder.config, builder.plugins).encode(
            self.rows,
            builder.codec,
            self.config,
            micro_batch_room(builder.config.engine, "engine"),
            self.key,
        )

        if dropped:
            log.info(f"{self.key}: dropped {dropped} rows that are too long", extra=PLAIN)
        for text in warnings:
            log.warning(f"{self.key}: {text}")
        return kept

    @property
    def kept(self) -> list[Row]:
        """The row of each example."""
        return [row for row, _ in self._encoded]

    @property
    def examples(self) -> list[Any]:
        """The examples of the rows, without those that were dropped."""
        return [example for _, example in self._encoded]


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
