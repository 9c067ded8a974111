"""``trackers=[tensorboard]``: event files of TensorBoard."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from coupler_trackers.config import TensorboardConfig
from coupler_trackers.library import COLUMNS, LibraryTracker, table

# Where a PNG has its width and its height, in four bytes each.
PNG_SIZE = slice(16, 24)


class TensorboardTracker(LibraryTracker):
    """Writes to ``tensorboard/`` of the run folder. A run that goes on adds a file."""

    library = "tensorboard"
    config: TensorboardConfig
    writer: Any = None

    def open(self) -> None:
        folder = self.config.folder or self.run_dir / "tensorboard"
        files = import_module("tensorboard.summary.writer.event_file_writer")
        self.writer = files.EventFileWriter(str(folder))
        if self.resolved:
            self._text("config", f"```\n{json.dumps(self.resolved, indent=2)}\n```", 0)

    def rewind(self, step: int) -> int:
        """Write the event at which TensorBoard drops what it has of later steps."""
        with self._open():
            events = self._of("event_pb2")
            start = events.SessionLog(status=events.SessionLog.START)
            self._add(step + 1, session_log=start)
        return super().rewind(step)

    def give(self, step: int, values: Mapping[str, float]) -> None:
        summaries = self._of("summary_pb2").Summary
        found = [summaries.Value(tag=name, simple_value=one) for name, one in values.items()]
        self._add(step, summary=summaries(value=found))
        self.writer.flush()

    def give_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *table(rows)]
        text = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
        self._text("samples", text, step)

    def give_picture(self, name: str, path: Path) -> None:
        content, summaries = path.read_bytes(), self._of("summary_pb2").Summary
        size = content[PNG_SIZE]

        image = summaries.Image(
            width=int.from_bytes(size[:4], "big"),
            height=int.from_bytes(size[4:], "big"),
            colorspace=4,
            encoded_image_string=content,
        )
        self._add(self.step, summary=summaries(value=[summaries.Value(tag=name, image=image)]))

    def finish(self, how: str) -> None:
        self._text("ended", how, self.step)

    def close(self) -> None:
        if self.opened:
            with self._named():
                self.writer.close()
            self.opened = False

    def _text(self, tag: str, text: str, step: int) -> None:
        summary, tensor = self._of("summary_pb2"), self._of("tensor_pb2")
        plugin = summary.SummaryMetadata.PluginData(plugin_name="text")

        value = summary.Summary.Value(
            tag=tag,
            metadata=summary.SummaryMetadata(plugin_data=plugin),
            tensor=tensor.TensorProto(
                dtype=self._of("types_pb2").DT_STRING,
                string_val=[text.encode()],
                tensor_shape=self._of("tensor_shape_pb2").TensorShapeProto(),
            ),
        )
        self._add(step, summary=summary.Summary(value=[value]))

    def _add(self, step: int, **content: Any) -> None:
        event = self._of("event_pb2").Event(wall_time=time.time(), step=step, **content)
        self.writer.add_event(event)

    @staticmethod
    def _of(name: str) -> Any:
        return import_module(f"tensorboard.compat.proto.{name}")


def _cell(value: Any) -> str:
    """Write a value as a cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")
