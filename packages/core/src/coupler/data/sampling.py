"""Let a class of the user pick the rows, for ``data.sampler``.

The class has this form. ``update`` may be left out.

.. code-block:: python

    class Sampler:
        def __init__(self, rows, seed, **sampler_args): ...
        def next(self) -> int: ...
        def update(self, row, rewards): ...
        def state(self) -> dict: ...
        def restore(self, state): ...

``rows`` are mappings as reward functions see them, without those that are too long.
``next`` returns a place in ``rows``. ``update`` hears the rewards of each group that
was scored, in the order in which ``next`` gave them out. Supervised training has no
rewards and never calls it. ``state`` is plain JSON.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from operator import index
from typing import Any, TypeVar

from coupler.data.dataset import Row
from coupler.data.options import DataConfig
from coupler.data.stream import PromptStream
from coupler.errors import CouplerError, DataError, place_of
from coupler.system.imports import resolve

T = TypeVar("T")

METHODS = ("next", "state", "restore")
FORM = (
    "  it has:  __init__(rows, seed, **sampler_args), next(), update(row, rewards), state() and "
    "restore(state)"
)


def prompt_stream(
    items: Sequence[T], rows: Sequence[Row], config: DataConfig, seed: int
) -> PromptStream[T]:
    """Return what picks the next of ``items``, each of which was made of one row.

    Raises:
        DataError: the class of ``config.sampler`` cannot be made.
    """
    if not config.sampler:
        return PromptStream(items, seed, config.shuffle)
    return SampledStream(items, rows, config.sampler, config.sampler_args, seed)


class SampledStream(PromptStream[T]):
    """Asks the class ``target`` of the user for every next row.

    Updates reach it in the order of admission: those of a group wait until all groups
    before it are finished. A checkpoint holds the waiting ones.

    Raises:
        DataError: code of the user raised, or returned what it must not.
    """

    def __init__(
        self,
        items: Sequence[T],
        rows: Sequence[Row],
        target: str,
        args: Mapping[str, Any],
        seed: int,
    ) -> None:
        self.rows, self.target = items, target
        self.waiting: dict[int, tuple[int, list[float]]] = {}
        seen = [row.as_mapping() for row in rows]

        made = self._class()
        try:
            inspect.signature(made).bind(seen, seed, **args)
        except TypeError as error:
            raise self._refusal(
                f"data.sampler_args does not fit: {error}.\n  it takes:  {inspect.signature(made)}"
            ) from None
        except ValueError:  # a class of C has no signature
            pass
        self.sampler = self._call("__init__", made, seen, seed, **args)

        if lacks := [name for name in METHODS if not callable(getattr(self.sampler, name, None))]:
            raise self._refusal(f"it has no method {lacks[0]}.\n{FORM}")

    def next(self) -> int:
        """Return the index of the next row in ``rows``."""
        found = self._call("next", self.sampler.next)
        try:
            row = index(found)
        except TypeError:
            row = -1
        if isinstance(found, bool) or not 0 <= row < len(self.rows):
            raise self._refusal(
                f"next() returned {found!r:.80}, which is no row.\n"
                f"  it may return:  an integer from 0 to {len(self.rows) - 1}"
            )
        return row

    def finished(
        self, number: int, row: int, rewards: list[float], unfinished: Collection[int]
    ) -> None:
        """Take the rewards of group ``number``, and pass on all whose turn it is."""
        self.waiting[number] = (row, rewards)
        update = getattr(self.sampler, "update", None)
        first = min(unfinished, default=None)

        for each in sorted(self.waiting):
            if first is not None and first < each:
                return
            done = self.waiting.pop(each)
            if update:
                self._call("update", update, *done)

    def state(self) -> dict[str, Any]:
        """Return the state of the class and the updates that wait, as plain JSON."""
        state = self._call("state", self.sampler.state)
        try:
            plain = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise self._refusal(f"state() returned what JSON cannot hold: {error}.") from None

        if plain != state:
            raise self._refusal(
                "state() returned what JSON would change: a key that is no text, or a tuple.\n"
                "  try:  mappings with texts as keys, lists, texts, numbers, true, false and null"
            )
        waiting = [[number, row, rewards] for number, (row, rewards) in self.waiting.items()]
        return {"sampler": plain, "waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, which is of the same rows."""
        self._call("restore", self.sampler.restore, state["sampler"])
        self.waiting = {number: (row, rewards) for number, row, rewards in state["waiting"]}

    def _class(self) -> Any:
        try:
            found = resolve(self.target)
        except (Exception, SystemExit) as error:  # importing runs the user's code
            raise DataError(f"data.sampler={self.target} cannot be imported: {error}") from error
        if not isinstance(found, type):
            raise self._refusal(f"it is a {type(found).__name__}, not a class.\n{FORM}")
        return found

    def _call(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except CouplerError:
            raise
        except (Exception, SystemExit) as error:  # code of the user
            raise self._refusal(
                f"{name}() raised {type(error).__name__}: {error}.\n  at:  {place_of(error)}"
            ) from error

    def _refusal(self, text: str) -> DataError:
        return DataError(f"data.sampler={self.target}: {text}")
