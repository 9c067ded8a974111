"""Write TensorBoard's event files in ``tensorboard/`` of the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coupler.errors import PluginError
from coupler.interfaces import Tracker


class TensorboardTracker(Tracker):
    """Writes what TensorBoard reads. Needs the extra ``coupler-core[tensorboard]``."""

    def __init__(self, config: Any, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError:
            raise PluginError(
                "tracker tensorboard needs the package tensorboard.\n"
                "  try:  pip install 'coupler-core[tensorboard]'"
            ) from None
        self.writer = EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] - generated code
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        """Write the event at which TensorBoard drops what it has of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        start = SessionLog(status=SessionLog.START)
        self.writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        self.writer.close()
