"""Make rows from the procedural tasks of reasoning-gym.

Example:
    ``data.source=coupler.data.reasoning_gym:rows data.args={task: chain_sum, size:
    1000, seed: 0, max_terms: 3}``
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from fractions import Fraction
from math import isfinite
from typing import Any

import numpy as np

from coupler.engine_kit.postponed import postponed
from coupler.errors import DataError

# Modules that draw, which are half of the import, and no task calls.
PICTURES = (
    "matplotlib",
    *("matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections"),
    "mpl_toolkits.mplot3d:Axes3D",
)
# Values that are written as they are.
ATOMS = frozenset({str, int, float, bool, type(None), bytes})


def rows(task: str, size: int, seed: int, **task_config: Any) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows of ``task``, each with the literal for its verifier in
    ``entry``.

    The entry travels with the row because some tasks generate other entries for the
    same seed in another process (they iterate over sets of strings). It is a literal
    because JSON makes lists of the tuples that some verifiers compare with.

    Raises:
        DataError: reasoning-gym is missing, knows no such task, refuses
            ``task_config``, or its entry is no literal.
    """
    dataset = create(task, {"size": size, "seed": seed, **task_config})
    for index in range(size):
        entry = _plain(dataset[index])
        yield {
            "prompt": entry["question"],
            "answer": entry["answer"] or "",
            "data_source": f"reasoning_gym/{task}",
            "task": task,
            "task_config": task_config,
            "entry": literal(entry, task, index),
        }


def library() -> Any:
    """Import reasoning-gym, which takes seconds."""
    try:
        with postponed(*PICTURES):
            import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"reasoning-gym: {error}.\n  try:  pip install 'coupler-core[reasoning-gym]'"
        ) from None
    return reasoning_gym


def create(task: str, config: dict[str, Any]) -> Any:
    """Create the reasoning-gym dataset of ``task``."""
    reasoning_gym = library()
    tasks = reasoning_gym.factory.DATASETS
    if task not in tasks:
        close = get_close_matches(task, tasks, n=1)
        hint = f" - did you mean {close[0]!r}?" if close else "."
        raise DataError(f"reasoning-gym has no task {task!r}{hint}")

    try:
        return reasoning_gym.create_dataset(task, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"the reasoning-gym task {task} refuses data.args {config}: {error}"
        ) from error


def literal(entry: dict[str, Any], task: str, index: int) -> str:
    """Write ``entry`` so that ``ast.literal_eval`` gives it back.

    Raises:
        DataError: it would not.
    """
    try:
        same = _is_literal(entry)
        text = repr(entry)
    except (ValueError, RecursionError):
        # An integer of more digits than Python writes, or an entry that is too deep.
        same, text = False, ""

    if not same:
        raise DataError(
            f"entry {index} of the reasoning-gym task {task} cannot be written down; its "
            "verifier needs it."
        )
    return text


def _is_literal(value: Any) -> bool:
    """Tell whether ``repr`` of a value is a literal of exactly this value."""
    kind = type(value)

    if kind in ATOMS:
        return kind is not float or isfinite(value)
    if kind is dict:
        return all(map(_is_literal, value)) and all(map(_is_literal, value.values()))
    return kind in (list, tuple, set) and all(map(_is_literal, value))


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {_plain(k): _plain(v) for k, v in value.items()}
    if kind in (list, tuple, set):
        return kind(map(_plain, value))

    match value:
        case dict():
            return {_plain(k): _plain(v) for k, v in value.items()}
        case list() | tuple() | set():
            return kind(_plain(v) for v in value)
        case np.generic():
            return value.item()
        # Facts that gsm_symbolic keeps beside the answer.
        case Fraction():
            return str(value)
    return value
