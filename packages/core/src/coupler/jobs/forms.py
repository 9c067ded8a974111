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
from coupler.data import examples
from coupler.data.preferences import labelled, pack_labelled, pack_pairs, pairs
from coupler.jobs.sft_trainer import pack
from coupler.plugins.manager import Plugins
from coupler.run.row_form import LABELS, PAIRS, SCORES, capabilities


@dataclass(frozen=True, slots=True)
class Form:
    """The steps from rows to a batch.

    Attributes:
        encode: as :func:`coupler.data.examples`.
        pack: makes a Batch of what ``encode`` made of rows.
    """

    encode: Callable[..., tuple[list[tuple[Any, Any]], int]]
    pack: Callable[[Sequence[Any]], Batch]


def form_of(config: RunConfig, plugins: Plugins) -> Form:
    """Return the form of rows that the algorithm of ``config`` trains on."""
    able = capabilities(config, plugins)
    if PAIRS in able:
        return Form(
            partial(pairs, scored=SCORES in able),
            pack_pairs,
        )
    if LABELS in able:
        return Form(labelled, pack_labelled)
    return Form(examples, pack)
