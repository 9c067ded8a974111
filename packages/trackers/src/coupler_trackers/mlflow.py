"""``trackers=[mlflow]``: an MLflow server, or a database in the run folder."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from coupler_trackers.config import MlflowConfig
from coupler_trackers.library import LibraryTracker

# A server takes so many metrics, and so many parameters, in one call.
MAX_METRICS, MAX_PARAMS = 1000, 100
MAX_NAME = 250
# The tag that finds the run again: its id.
RUN_TAG = "coupler.run"


class MlflowTracker(LibraryTracker):
    """Logs to the MLflow run that has the id of this run as a tag.

    A server cannot delete numbers: a step that is taken again has both there. From the
    database in the run folder, the first ones are deleted.
    """

    library = "mlflow"
    config: MlflowConfig
    client: Any = None
    run_id = ""

    @property
    def database(self) -> Path:
        """The file that is used where there is no server."""
        return self.run_dir / "mlflow" / "mlflow.db"

    @property
    def uri(self) -> str:
        """The server, or an empty text for the database in the folder of the run."""
        return self.config.uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def rewind(self, step: int) -> int:
        if self.database.is_file():
            with closing(sqlite3.connect(self.database)) as database, database:
                for name in ("metrics", "latest_metrics"):
                    database.execute(f"DELETE FROM {name} WHERE step > ?", (step,))  # noqa: S608 - a name of ours
        return super().rewind(step)

    def open(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if not self.uri:
            self.database.parent.mkdir(exist_ok=True)

        uri = self.uri or f"sqlite:///{self.database.resolve()}"
        self.client = self.imported().MlflowClient(uri)
        experiment = self._experiment()

        found = self.client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{self.run}'")
        if found:
            self.run_id = found[0].info.run_id
            self.client.update_run(self.run_id, "RUNNING")
        else:
            tags = {**self.config.tags, RUN_TAG: self.run}
            made = self.client.create_run(experiment, run_name=self.title, tags=tags)
            self.run_id = made.info.run_id
            self._log_params()
        self.client.log_dict(self.run_id, self.resolved, "config.yaml")

    def _experiment(self) -> str:
        name = self.config.experiment
        if found := self.client.get_experiment_by_name(name):
            return found.experiment_id
        folder = self.database.parent.resolve() / "artifacts"
        place = None if self.uri else folder.as_uri()
        return self.client.create_experiment(name, artifact_location=place)

    def _log_params(self) -> None:
        """Log the options as parameters, which a later start cannot change."""
        param = self.imported().entities.Param
        params = [param(key, str(value)[:500]) for key, value in _flat(self.resolved).items()]
        for first in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(self.run_id, params=params[first : first + MAX_PARAMS])

    def give(self, step: int, values: Mapping[str, float]) -> None:
        metric, now = self.imported().entities.Metric, int(time.time() * 1000)
        named = {_name(name): value for name, value in values.items()}
        metrics = [metric(name, value, now, step) for name, value in named.items()]
        for first in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[first : first + MAX_METRICS])

    def give_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        self.client.log_text(self.run_id, text, f"samples/step_{step}.jsonl")

    def give_picture(self, name: str, path: Path) -> None:
        self.client.log_artifact(self.run_id, str(path))

    def finish(self, how: str) -> None:
        self.client.set_tag(self.run_id, "coupler.ended", how)
        status = {"done": "FINISHED", "interrupted": "KILLED"}.get(how, "FAILED")
        self.client.set_terminated(self.run_id, status)


def _name(name: str) -> str:
    """Write a name in the characters that MLflow takes, as no path out of a folder."""
    plain = re.sub(r"[^\w .:/-]", "_", name)
    parts = [part for part in plain.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME] or "unnamed"


def _flat(values: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Return dotted keys and their values."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{start}{name}.") if inner else {f"{start}{name}": value}
    return flat
