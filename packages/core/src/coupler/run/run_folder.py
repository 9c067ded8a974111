"""Keep the folder and the trackers of one run."""

from __future__ import annotations

import hashlib
import json
import os
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from pathlib import Path
from typing import Any

from coupler.config.effect import not_default
from coupler.config.schema import RunConfig
from coupler.conversation.packing import Sample
from coupler.errors import CouplerError
from coupler.executors.classes import load_class
from coupler.interfaces import Tracker
from coupler.metrics import Metrics, values
from coupler.plugins.manager import Plugins
from coupler.run.background import Background
from coupler.run.format import FORMAT, KEY, check_format
from coupler.run.manifest import RUN, folders, whole
from coupler.run.picture import draw_reward
from coupler.run.provenance import describe_run
from coupler.system.files import (
    DamagedFile,
    check_writable,
    read_bytes,
    read_json,
    set_aside,
    write_whole,
    writing,
)
from coupler.system.log import get_logger
from coupler.system.plain import to_plain
from coupler.system.reads import original

# Key of run.json: options whose values were not the defaults of that release.
NOT_DEFAULT = "not_default"
# Key of run.json: the hash of config.yaml as that start wrote it.
DIGEST = "config.yaml"
# Key of run.json: how that start ended. One that was killed does not have it.
ENDED = "ended"
DONE, INTERRUPTED = "done", "interrupted"

log = get_logger(__name__)


class Journal:
    """Owns ``config.yaml``, ``run.json``, the samples and the trackers of a run."""

    def __init__(
        self,
        config: RunConfig,
        resolved: str,
        plugins: Plugins,
        facts: Mapping[str, Any],
        code: Mapping[str, Path],
        done: int = 0,
    ) -> None:
        """Go on after step ``done`` in a folder that is there.

        Args:
            facts: what ``run.json`` will hold too.
            code: see :func:`describe_run`.
        """
        self.run_dir = Path(config.run_dir)
        self.resolved = resolved
        self.plugins, self.facts, self.code = plugins, facts, code
        self.not_default = not_default(config)
        self.total_steps, self.done = config.steps, done

        self.trackers: dict[str, Tracker] = {}
        for name in config.trackers:
            with self._tracking(name):
                tracker = self.trackers[name] = self._open(config, name)
                tracker.start(facts.get(RUN, ""), to_plain(original(config)))
                if done or os.path.lexists(self.run_dir / "config.yaml"):
                    tracker.rewind(done or -1)

    def _open(self, config: RunConfig, name: str) -> Tracker:
        """Make a tracker with its options, all of which count as read."""
        settings = getattr(config.tracker, name, None)
        settings = copy(settings) if settings else self.plugins.get("tracker", name).config()
        tracker = load_class(self.plugins, "tracker", name)(settings, self.run_dir)
        return Background(name, tracker) if tracker.in_background else tracker

    def log(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Give the numbers of a step to every tracker and plugin, and return them."""
        numbers = values(metrics)

        # A run that fails before its first numbers leaves nothing that would refuse the
        # next try.
        if self.resolved:
            with writing(f"what {self.run_dir} says of the run"):
                write_whole(self.run_dir / "config.yaml", self.resolved)
                self._write_manifest()
            self.resolved = ""

        for name, tracker in self.trackers.items():
            with self._tracking(name):
                tracker.log(step, {**numbers, "run/steps": float(self.total_steps)})
        self.plugins.call("coupler_step_end", step=step, values=numbers)
        return numbers

    def show(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Give the samples of a step to every tracker."""
        for name, tracker in self.trackers.items():
            with self._tracking(name):
                tracker.samples(step, lines)

    def _write_manifest(self) -> None:
        """Add this start to ``run.json``: one object per start of the run."""
        path = self.run_dir / "run.json"
        about = {
            KEY: FORMAT,
            **describe_run(self.code),
            NOT_DEFAULT: self.not_default,
            DIGEST: digest_of(self.run_dir / "config.yaml"),
            **self.facts,
        }
        starts = read_starts(self.run_dir)
        if not starts and os.path.lexists(path):
            log.warning(f"{path} is kept as {set_aside(path)}")
        write_whole(path, json.dumps([*starts, about], indent=2))

    def _write_end(self, error: BaseException | None) -> None:
        """Add to this start's entry how it ended, as far as that can be written."""
        starts = [] if self.resolved else read_starts(self.run_dir)
        if starts:
            starts[-1][ENDED] = _end(error)
            with suppress(OSError):
                write_whole(self.run_dir / "run.json", json.dumps(starts, indent=2))

    def write_samples(
        self, name: str, scored: Iterable[Sample], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Write every scored episode as one JSON object a line."""
        path = self.run_dir / name
        with writing(f"the samples {path}"):
            check_writable(path)
        with writing(f"the samples {path}"), path.open("w", encoding="utf-8") as file:
            for sample in scored:
                line = {
                    "row": sample.prompt.row.index,
                    "answer": sample.prompt.row.answer,
                    "completion": sample.text,
                    "reward": sample.reward,
                    **({"read": sample.answer} if sample.answer is not None else {}),
                    **sample.opinions,
                    "finish": sample.finish,
                    **_conversation(sample, decode),
                }
                file.write(json.dumps(line) + "\n")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Close every tracker, and write to ``run.json`` how the run ended.

        Where the run has failed already, the failure of the run is the one to show.
        """
        self._write_end(error)
        wanted = any(map(_takes_pictures, self.trackers.values()))
        drawn = draw_reward(self.run_dir) if wanted else None
        with suppress(Exception) if kind else nullcontext(), ExitStack() as closing:
            for name, tracker in self.trackers.items():
                closing.callback(self._close, name, tracker, _end(error), drawn)

    def _close(self, name: str, tracker: Tracker, how: str, drawn: Path | None) -> None:
        with self._tracking(name), ExitStack() as closing:
            closing.callback(tracker.close)
            if drawn:
                tracker.picture(drawn.stem, drawn)
            tracker.ended(how)

    def _tracking(self, name: str) -> AbstractContextManager[None]:
        return writing(f"the numbers of tracker {name} in {self.run_dir}")


def _takes_pictures(tracker: Tracker) -> bool:
    inner = tracker.tracker if isinstance(tracker, Background) else tracker
    return type(inner).picture is not Tracker.picture


def _end(error: BaseException | None) -> str:
    """Return ``done``, ``interrupted``, or the first line of the error."""
    if error is None:
        return DONE
    # Ctrl-C cancels what runs in the loop.
    if isinstance(error, KeyboardInterrupt | CancelledError):
        return INTERRUPTED
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, CouplerError) else f"{type(error).__name__}: {text}"


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return what ``run.json`` says of each start of the run in ``run_dir``.

    The list is empty, with a warning, where the file is damaged: a run goes on without
    it.

    Raises:
        CouplerError: a newer release wrote it, in a format that this one does not know.
    """
    path = run_dir / "run.json"
    if not os.path.lexists(path):
        return []
    try:
        starts = read_json(path, list)
        if not all(isinstance(start, dict) for start in starts):
            raise DamagedFile(f"{path} is damaged: it holds no list of starts.")
        for start in starts:
            check_format(start, path)
    except DamagedFile as error:
        log.warning(f"{error} What it says of earlier starts is not known.")
        return []
    return starts


def find_run(run_dir: Path) -> str:
    """Return the id of the run in ``run_dir``, or an empty text where it has none.

    Every start, checkpoint and record has the id, so that a file from another run
    shows. Where ``run.json`` and the checkpoints contradict each other, ``config.yaml``
    says which of them is of this run.
    """
    starts = read_starts(run_dir)
    said = next((start[RUN] for start in reversed(starts) if isinstance(start.get(RUN), str)), "")
    manifests = [whole(folder) for folder in folders(run_dir / "checkpoints")]
    ids = Counter(manifest[RUN] for manifest in manifests if manifest and manifest.get(RUN))
    if not ids or said in ids:
        return said

    if said and starts[-1].get(DIGEST) == digest_of(run_dir / "config.yaml"):
        return said
    (common, _) = ids.most_common(1)[0]
    if said:
        log.warning(f"{run_dir / 'run.json'} is of another run than config.yaml and checkpoints")
    return common


def digest_of(path: Path) -> str:
    """Return the hash of a text file, or an empty text where it cannot be read."""
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest()
    except DamagedFile:
        return ""


def _conversation(sample: Sample, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return what was said in an episode of several turns, in all of its rows."""
    rows = [row.trajectory.segments for row in sample.rows]
    if sum(len(row.completions) for row in sample.rows) < 2:
        return {}
    said = [[{s.origin.value: decode(s.ids)} for s in segments] for segments in rows]
    return {"conversation": said}
