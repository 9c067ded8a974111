"""Hold tools that are classes: each episode has an object of its own."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from coupler import CouplerError
from coupler_agents.tools.row_kwargs import Given
from coupler_agents.tools.schema import schema_of

Run = Callable[..., Awaitable[Any]]  # calls a method, in a thread where it may block


def described(made: type, where: str) -> dict[str, Any]:
    """Return the schema of a tool that is a class: that of ``__call__``, under the name
    of the class.

    Raises:
        CouplerError: it has no ``__call__``, or that cannot be described.
    """
    if "__call__" not in dir(made):
        raise CouplerError(
            f"{where}: the class {made.__name__} is no tool.\n"
            "  it needs:  a method __call__ with types and a docstring"
        )
    schema = schema_of(made.__call__, f"{where}: {made.__name__}")
    return {**schema, "function": {**schema["function"], "name": made.__name__}}


async def begin(
    classes: Mapping[str, type], given: Mapping[str, Given], run: Run, held: AsyncExitStack
) -> dict[str, Any]:
    """Make the objects of an episode, and reset each with its ``create_kwargs``.

    Args:
        held: releases them at the end, with their ``release_kwargs``.
    """
    made: dict[str, Any] = {}

    for name, cls in classes.items():
        own = given.get(name, Given())
        tool = await run(cls)
        made[name] = tool
        if hasattr(tool, "release"):
            held.push_async_callback(run, tool.release, **own.release_kwargs)
        if hasattr(tool, "reset"):
            await run(tool.reset, **own.create_kwargs)
    return made


async def rewards(
    objects: Mapping[str, Any], given: Mapping[str, Given], run: Run
) -> dict[str, float]:
    """Return the rewards of those objects that give one, with their
    ``calc_reward_kwargs``.

    Raises:
        CouplerError: one is no finite number.
    """
    found: dict[str, float] = {}

    for name, tool in objects.items():
        if hasattr(tool, "get_reward"):
            kwargs = given.get(name, Given()).calc_reward_kwargs
            value = await run(tool.get_reward, **kwargs)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise CouplerError(f"{name}.get_reward returned {value!r:.100}, and no number.")
            found[name] = float(value)
    return found
