"""Find options that a user set and that nothing reads. They do not do what the user
thinks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reads:
    """The full keys of the options that were read so far."""

    keys: set[str] = field(default_factory=set)

    def unread(self, set_keys: Iterable[str]) -> list[str]:
        """Return those of ``set_keys`` that were not read. An entry of a mapping is
        read when the mapping is.
        """
        return [
            key for key in set_keys if not any(prefix in self.keys for prefix in _prefixes(key))
        ]


def track(config: T) -> tuple[T, Reads]:
    """Return a copy of a dataclass instance that records which options are read, and
    the record.

    The copy and its sections still are instances of their classes.
    ``dataclasses.replace`` gives copies that record too, and ``asdict`` and pickling
    read everything. Comparing, printing and ``__post_init__`` read nothing. Setting an
    attribute raises: nothing changes a configuration.
    """
    reads = Reads()
    return tracked(config, reads, ""), reads


def original(config: T) -> T:
    """Return the instance that :func:`track` was given, or ``config`` itself if it is
    not tracked. Reading the result leaves no record.
    """
    return object.__getattribute__(config, _ORIGINAL) if hasattr(type(config), _TRACKED) else config


def path_of(config: Any) -> str:
    """Return the place of a tracked section in the whole, for example ``"engine."``, or
    the empty text for one that is not tracked.
    """
    return getattr(type(config), _TRACKED) if hasattr(type(config), _TRACKED) else ""


_ORIGINAL, _TRACKED = "_coupler_original", "_coupler_tracked"


def tracked(config: T, reads: Reads, start: str) -> T:
    """Track a section whose keys begin with ``start``, in a record that exists."""
    made = object.__new__(_tracked_class(type(config), reads, start))
    _fill(made, config, reads, start)
    return made


def _fill(made: Any, config: Any, reads: Reads, start: str) -> None:
    for name in {f.name for f in fields(config)} | getattr(config, "__dict__", {}).keys():
        value = getattr(config, name)
        inner = tracked(value, reads, f"{start}{name}.") if is_dataclass(value) else value
        object.__setattr__(made, name, inner)
    object.__setattr__(made, _ORIGINAL, config)


def _tracked_class(cls: type, reads: Reads, start: str) -> type:
    names = frozenset(f.name for f in fields(cls))

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in names and not is_dataclass(value) and not _is_replace(sys._getframe(1)):
            reads.keys.add(start + name)
        return value

    def write(_self: Any, name: str, _value: Any) -> None:
        raise AttributeError(
            f"{start}{name} cannot be set: nothing changes the configuration of a run"
        )

    # dataclasses.replace calls this.
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        made = cls(*map(original, args), **{k: original(v) for k, v in kwargs.items()})
        _fill(self, made, reads, start)

    # pickle and copy call this. Reads of their results cannot be seen.
    def reduce(self: Any, _protocol: Any) -> Any:
        reads.keys.update(start + name for name in names)
        return copy, (original(self),)

    body: dict[str, Any] = {
        "__getattribute__": read,
        "__setattr__": write,
        "__init__": construct,
        "__reduce_ex__": reduce,
        "__eq__": lambda self, other: original(self) == original(other),
        "__hash__": cls.__hash__,
        "__repr__": lambda self: repr(original(self)),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _TRACKED: start,
    }
    return type(cls.__name__, (cls,), body)


def _is_replace(frame: FrameType) -> bool:
    """Tell whether ``dataclasses.replace`` reads a field, which it only copies."""
    return frame.f_globals.get("__name__") == "dataclasses" and frame.f_code.co_name in (
        "replace",
        "_replace",
    )


def _prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))
