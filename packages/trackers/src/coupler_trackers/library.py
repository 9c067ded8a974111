"""Define what the trackers of libraries share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from coupler import CouplerError, Tracker
from coupler.errors import PluginError
from coupler_trackers.kept import Kept, samples_until

# What a table of samples shows.
COLUMNS = ("group", "prompt", "completion", "reward", "advantage", "finish", "tokens")


class LibraryTracker(Tracker):
    """A tracker that a library implements.

    The library is imported, and its run is opened, with the first thing to record.
    Where it keeps its numbers in files of this run, :meth:`rewind` deletes these, and
    gives the library again what stays.
    """

    in_background = True
    library: ClassVar[str]

    def __init__(self, config: Any, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        if problem := missing(self.library):
            raise PluginError(problem)
        self.run, self.resolved = "", {}
        self.step, self.opened = 0, False
        self.kept = Kept(run_dir / "trackers" / f"{self.library}.jsonl")

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        self.run, self.resolved = run, dict(config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, values)
        self.kept.add(step, values if self.in_files() else {})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._open():
            self.give_samples(step, rows)

    def picture(self, name: str, path: Path) -> None:
        with self._open():
            self.give_picture(name, path)

    def rewind(self, step: int) -> int:
        kept = self.kept.rewind(step)
        if self.in_files():
            shown = dict(samples_until(self.run_dir, step))
            with self._named():
                self.close()
                self.forget()

            for number, values in kept:
                if rows := shown.get(number):
                    self.samples(number, rows)
                self._log(number, values)
        return kept[-1][0] if kept else -1

    def ended(self, how: str) -> None:
        if self.opened:
            with self._named():
                self.finish(how)

    @property
    def title(self) -> str:
        """The name of the run: the one that the user chose, or that of its folder."""
        return self.config.run_name or self.run_dir.resolve().name

    def imported(self) -> Any:
        return import_module(self.library)

    def in_files(self) -> bool:
        """Tell if the library keeps its numbers in files of this run alone."""
        return False

    def forget(self) -> None:
        """Delete the files of :meth:`in_files`."""

    @abstractmethod
    def open(self) -> None:
        """Open the run of the library, or go on with it."""

    @abstractmethod
    def give(self, step: int, values: Mapping[str, float]) -> None:
        """Give the library the numbers of a step."""

    @abstractmethod
    def give_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Give the library the samples of a step."""

    @abstractmethod
    def give_picture(self, name: str, path: Path) -> None:
        """Give the library a PNG."""

    @abstractmethod
    def finish(self, how: str) -> None:
        """Tell the library how the run ended."""

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        with self._open():
            self.step = step
            self.give(step, values)

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._named():
            if not self.opened:
                self.open()
                self.opened = True
            yield

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Make one sentence of whatever the library raises.

        Raises:
            CouplerError: it raised something.
        """
        try:
            yield
        except (CouplerError, OSError):
            raise
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise CouplerError(f"{self.library}: {type(error).__name__}: {first}") from error


class LiveTracker(LibraryTracker):
    """A tracker whose library logs numbers, tables and images to a live run."""

    live: Any = None

    def give(self, step: int, values: Mapping[str, float]) -> None:
        self.live.log(dict(values), step=step)

    def give_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        shown = self.imported().Table(columns=list(COLUMNS), data=table(rows))
        self.live.log({"samples": shown}, step=step)

    def give_picture(self, name: str, path: Path) -> None:
        self.live.log({name: self.imported().Image(str(path))}, step=self.step)

    def close(self) -> None:
        if self.opened:
            self.live.finish()
            self.opened = False


def missing(library: str) -> str:
    """Say what to install where the library is not installed, or nothing."""
    if find_spec(library) is not None:
        return ""
    return (
        f"tracker {library} needs the package {library}.\n"
        f"  try:  pip install 'coupler-trackers[{library}]'"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the :data:`COLUMNS` of samples."""
    return [[row.get(column) for column in COLUMNS] for row in rows]
