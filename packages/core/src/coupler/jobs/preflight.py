"""Check a job before it starts.

The checks are of interpreters, tested versions, places for workers, and options that
nothing read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coupler.config.checks import does_sample
from coupler.config.compose import Composed
from coupler.config.options import SECTIONS, section
from coupler.config.schema import JOBS, MAY_HAVE, ExecutorName, Job, RunConfig
from coupler.errors import ConfigError
from coupler.executors.classes import check_spelling as look_for
from coupler.executors.classes import load_class
from coupler.executors.interpreter import check_interpreter
from coupler.executors.placement import Role
from coupler.jobs.build import Builder
from coupler.plugins.manager import Plugins
from coupler.run.tested import tested_ranges
from coupler.system.log import get_logger

log = get_logger(__name__)

# kinds whose backends run in this process
CONTROLLERS = ("tracker", "sharding", "algorithm", "environment")


def check_spelling(composed: Composed, plugins: Plugins, job: Job) -> None:
    """Look for the class of each backend that a job starts, and import nothing.

    What another interpreter runs is looked up there, in :func:`place`.

    Raises:
        PluginError: a module is missing, or a class misspelt.
    """
    for kind, name, python in _backends(composed.config, job):
        if not python:
            look_for(plugins, kind, name)
    if transport := composed.config.sync.transport:
        look_for(plugins, "transport", transport)


def import_classes(builder: Builder, job: Job) -> None:
    """Import the classes that this process runs, before a worker starts.

    Those of other processes are imported there, before they load anything. The
    environment is made here, and the chat template proved for it.

    Raises:
        PluginError: one is missing, abstract or of another type.
    """
    near = builder.composed.config.executor is not ExecutorName.RAY
    for kind, name, python in _backends(builder.composed.config, job):
        if not python and (near or kind in CONTROLLERS):
            load_class(builder.plugins, kind, name)
    builder.prepare_environment()


def _backends(config: RunConfig, job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and interpreter of each backend that a job starts."""
    samples = does_sample(config, job)
    started = (*JOBS[job], *(MAY_HAVE[job] if samples else ()))
    for path, kind in SECTIONS.items():
        inner = section(config, path)
        if inner and path in started:
            yield kind, inner.name, getattr(inner, "python", "")
    yield from (("tracker", name, "") for name in config.trackers)
    if samples:
        yield "sharding", config.sync.manager, ""


async def place(builder: Builder, roles: Sequence[Role]) -> None:
    """Check the interpreters of roles that have their own, and place all workers.

    The log warns of versions that backends in our own interpreter were not tested with.
    """
    config, plugins = builder.config, builder.plugins

    ours = [("tracker", name) for name in config.trackers]
    for path, kind in SECTIONS.items():
        inner = section(config, path)
        if inner and kind not in CONTROLLERS and inner.python:
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
