"""Say at the end of a run what came of it, and what to type next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from coupler.config.schema import RunConfig
from coupler.plugins.manager import Plugins
from coupler.run.model_card import measured, serving
from coupler.run.samples import FOLDER
from coupler.run.saving import export_folder
from coupler.system.terminal import in_columns


def closing(config: RunConfig, plugins: Plugins) -> str:
    """Return the lines of a table in two columns, empty where there is nothing to say.

    Its numbers are those of ``metrics.jsonl``, of all starts of the run.
    """
    return in_columns(list(_rows(config, plugins)))


def _rows(config: RunConfig, plugins: Plugins) -> Iterator[tuple[str, str]]:
    run_dir, export = Path(config.run_dir), export_folder(config.run_dir, "policy")
    yield from measured(run_dir / "metrics.jsonl").items()

    if os.path.isdir(run_dir / FOLDER):
        yield "samples", f"coupler show {shlex.quote(str(run_dir))}"
    if os.path.isdir(export):
        yield "export", str(export)
        for command in serving(plugins, export):
            yield "serve it", command
