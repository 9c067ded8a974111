"""Declare what Coupler reads when it lists plugins: imports the standard library and
coupler only.
"""

from dataclasses import dataclass

from coupler import Backend, hookimpl


@dataclass
class SqliteConfig:
    name: str = "sqlite"


@hookimpl
def coupler_backends():
    yield Backend(
        kind="tracker",
        name="sqlite",
        target="coupler_tracker_sqlite.tracker:SqliteTracker",
        config=SqliteConfig,
    )
