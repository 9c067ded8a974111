"""Read back what each library keeps of a run, with the library's own formats."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7


@dataclass
class Stored:
    """What a store holds of one run."""

    numbers: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Steps and values of each name, in the order in which they were written."""
    config: Any = None
    ended: str = ""
    shown: set[str] = field(default_factory=set)
    """Names of samples and pictures."""
    ids: set[str] = field(default_factory=set)

    def add(self, name: str, step: int, value: float) -> None:
        self.numbers.setdefault(name, []).append((step, value))


def of_wandb(run_dir: Path) -> Stored:
    from wandb.proto.wandb_internal_pb2 import Record

    stored = Stored()
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for content in _records(path):
            record = Record.FromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                stored.ids.add(record.run.run_id)
                updates = record.run.config.update
                stored.config = {each.key: json.loads(each.value_json) for each in updates}
            elif kind == "history":
                found = {
                    ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                step = found.pop("_step")
                for name, value in found.items():
                    if isinstance(value, dict) or "." in name:
                        stored.shown.add(name.partition(".")[0])
                    else:
                        stored.add(name, step, value)
            elif kind == "summary":
                for item in record.summary.update:
                    if "ended" in (item.key, *item.nested_key):
                        stored.ended = json.loads(item.value_json)
            elif kind == "exit":
                stored.ended += f" {record.exit.exit_code}"
    return stored


def of_swanlab(run_dir: Path) -> Stored:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    stored = Stored()
    for path in sorted(run_dir.glob("swanlab/run-*/*.swanlab")):
        stored.config = (path.parent / "files" / "config.yaml").read_text()
        for content in _records(path):
            record = Record.FromString(content)
            if record.HasField("start"):
                stored.ids.add(record.start.id)
            elif record.HasField("scalar"):
                scalar = record.scalar
                stored.add(scalar.key, scalar.step, scalar.value.number)
            elif record.HasField("media"):
                stored.shown.add(record.media.key)
            elif record.HasField("finish"):
                stored.ended = f"{record.finish.state} {record.finish.error}".strip()
    return stored


def of_trackio(run_dir: Path) -> Stored:
    stored = Stored()
    with closing(sqlite3.connect(run_dir / "trackio" / "coupler.db")) as database:
        for name, step, text in database.execute("SELECT run_name, step, metrics FROM metrics"):
            stored.ids.add(name)
            for key, value in json.loads(text).items():
                if isinstance(value, dict):
                    stored.shown.add(key)
                else:
                    stored.add(key, step, value)
        (text,) = database.execute("SELECT config FROM configs").fetchone()
        stored.config = json.loads(text)
        for (text,) in database.execute("SELECT text FROM alerts"):
            stored.ended = text
    return stored


def of_tensorboard(run_dir: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    stored = Stored()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            stored.add(tag, event.step, event.value)
    stored.shown = {*events.Tags()["images"], *events.Tags()["tensors"]}

    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    stored.config = json.loads(texts["config"].strip("`\n"))
    stored.ended = texts.get("ended", "")
    return stored


def of_mlflow(uri: str, experiment: str = "coupler") -> Stored:
    from mlflow import MlflowClient

    client, stored = MlflowClient(uri), Stored()
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    for run in client.search_runs([found.experiment_id]):
        stored.ids.add(run.info.run_id)
        stored.config = run.data.params
        stored.ended = f"{run.info.status} {run.data.tags.get('coupler.ended')}"
        stored.shown = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                stored.add(name, metric.step, metric.value)
    return stored


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, behind the library's header."""
    content, at, record = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
