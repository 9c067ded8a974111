"""Check a job before it starts.

The checks are of interpreters, tested versions, places for workers, and options that
nothing read.
"""

from __future__ import annotations

from collections.abc import Sequence

from coupler.config.options import SECTIONS, section
from coupler.errors import ConfigError
from coupler.executors.interpreter import check_interpreter
from coupler.executors.placement import Role
from coupler.jobs.build import Builder
from coupler.plugins.tested import tested_ranges
from coupler.system.log import get_logger

log = get_logger(__name__)


async def place(builder: Builder, roles: Sequence[Role]) -> None:
    """Check the interpreters of roles that have their own, and place all workers.

    The log warns of versions that backends in our own interpreter were not tested with.
    """
    config, plugins = builder.config, builder.plugins

    ours = [("tracker", name) for name in config.trackers]
    for path, kind in SECTIONS.items():
        inner = section(config, path)
        if inner and kind != "algorithm" and inner.python:
            check_interpreter(kind, inner.name, inner.python, plugins)
        elif inner:
            ours.append((kind, inner.name))

    for one in tested_ranges(plugins, ours):
        if not one.within:
            log.warning(f"{one.distribution} {one.problem}")
    await builder.executor.place(roles)


async def report_unread(builder: Builder, read_later: tuple[str, ...] = ()) -> None:
    """Name the keys that were set and that nothing has read.

    Args:
        read_later: beginnings of keys whose reader comes after this.

    Raises:
        ConfigError: there are some, and ``strict`` is set.
    """
    # The key counts as read from here on.
    strict = builder.config.strict
    builder.reads.keys.update(await builder.executor.reads())
    unread = [
        key
        for key in builder.reads.unread(builder.composed.set_keys)
        if not key.startswith(read_later)
    ]
    if not unread:
        return

    sentence = (
        f"you set {', '.join(unread)}, and nothing read {'it' if len(unread) == 1 else 'them'}."
    )
    if strict:
        raise ConfigError(
            f"{sentence}\n  try:  leave them out; what you wanted has another name or another "
            "backend"
        )
    log.warning(sentence)
