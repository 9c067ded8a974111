"""Find options that a user set and that nothing reads: they do not do what the user thinks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Reads:
    """The full keys of the options that were read so far."""

    keys: set[str] = field(default_factory=set)
    paused: int = 0

    def unread(self, set_keys: Iterable[str]) -> list[str]:
        """Return those of ``set_keys`` that were not read. An entry of a mapping is read when the mapping is."""
        return [key for key in set_keys if not any(prefix in self.keys for prefix in _prefixes(key))]

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1


def track(config: T) -> tuple[T, Reads]:
    """Return a copy of a dataclass instance that records which options are read, and the record.

    The copy and its sections are instances of their classes still, ``dataclasses.replace`` gives copies that record
    too, and ``asdict`` and pickling read everything. Comparing, printing and ``__post_init__`` read nothing.
    Setting an attribute raises: nothing changes a configuration.
    """
    reads = Reads()
    return _tracked(config, reads, ""), reads


def original(config: T) -> T:
    """Return what :func:`track` was given, or ``config`` itself: reading that is not recorded."""
    return object.__getattribute__(config, "__dict__").get(_ORIGINAL, config)


_ORIGINAL = "_coupler_original"


def _tracked(config: Any, reads: Reads, start: str) -> Any:
    cls = type(config)
    copy = object.__new__(_tracked_class(cls, reads, start))
    for name, value in vars(config).items():
        inner = _tracked(value, reads, f"{start}{name}.") if is_dataclass(value) else value
        object.__setattr__(copy, name, inner)
    object.__setattr__(copy, _ORIGINAL, config)
    return copy


def _tracked_class(cls: type, reads: Reads, start: str) -> type:
    names = frozenset(f.name for f in fields(cls))

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in names and not reads.paused and not is_dataclass(value) and not _is_replace(sys._getframe(1)):
            reads.keys.add(start + name)
        return value

    def write(self: Any, name: str, value: Any) -> None:
        if _ORIGINAL in self.__dict__:
            raise AttributeError(f"{start}{name} cannot be set: nothing changes the configuration of a run")
        object.__setattr__(self, name, value)

    def equal(self: Any, other: Any) -> bool:
        return original(self) == original(other)

    def reduce(self: Any, protocol: Any) -> Any:
        reads.keys.update(start + name for name in names)
        return original(self).__reduce_ex__(protocol)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # what dataclasses.replace calls
        with reads.pause():
            cls.__init__(self, *args, **kwargs)
            object.__setattr__(self, _ORIGINAL, cls(*args, **kwargs))

    body: dict[str, Any] = {
        "__getattribute__": read,
        "__setattr__": write,
        "__eq__": equal,
        "__hash__": cls.__hash__,
        "__repr__": lambda self: repr(original(self)),
        "__reduce_ex__": reduce,
        "__init__": __init__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls,), body)


def _is_replace(frame: Any) -> bool:
    """Whether a field is read by ``dataclasses.replace``, which only copies it."""
    return frame.f_globals.get("__name__") == "dataclasses" and frame.f_code.co_name in ("replace", "_replace")


def _prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))
