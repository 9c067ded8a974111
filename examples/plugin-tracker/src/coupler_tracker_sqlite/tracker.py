"""``trackers=[sqlite]``: ``metrics.sqlite`` in the run folder."""

import sqlite3
from contextlib import contextmanager

from coupler import CouplerError, Tracker


class SqliteTracker(Tracker):
    def __init__(self, config, run_dir):
        super().__init__(config, run_dir)
        with self._speaking():
            self.database = sqlite3.connect(run_dir / "metrics.sqlite", check_same_thread=False)
            self.database.execute(
                "CREATE TABLE IF NOT EXISTS metrics (step INTEGER, name TEXT, value REAL)"
            )

    def log(self, step, values):
        # NaN becomes NULL
        rows = [(step, name, float(value)) for name, value in values.items()]
        with self._speaking(), self.database:
            self.database.executemany("INSERT INTO metrics VALUES (?, ?, ?)", rows)

    def rewind(self, step):
        with self._speaking(), self.database:
            self.database.execute("DELETE FROM metrics WHERE step > ?", (step,))

    def close(self):
        self.database.close()

    @contextmanager
    def _speaking(self):
        """Make a sentence of sqlite's errors, which are no ``OSError``."""
        try:
            yield
        except sqlite3.Error as error:
            path = self.run_dir / "metrics.sqlite"
            raise CouplerError(
                f"{path} cannot be written: {error}.\n  look at:  room on the disk"
            ) from error
