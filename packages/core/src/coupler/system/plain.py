"""Turn configuration classes into plain data, which crosses to a process that may have
another version of everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from coupler.system.imports import resolve
from coupler.system.reads import Reads, original, path_of, tracked

# Options that this process read from configurations that another one sent.
RECEIVED = Reads()


@dataclass(frozen=True, slots=True)
class Section:
    """A backend's configuration on its way: the name of its class and plain values,
    never the class.
    """

    path: str  # of its keys, for example "engine."
    target: str  # "package.module:Class"
    values: dict[str, Any]

    @classmethod
    def of(cls, config: Any) -> Section:
        """Pack a configuration. Reading it here does not count as using it."""
        path, config = path_of(config), original(config)
        kind = type(config)
        return cls(path, f"{kind.__module__}:{kind.__qualname__}", to_plain(config))

    def open(self) -> Any:
        """Make the configuration again. Reads of it are recorded in ``RECEIVED``."""
        return tracked(from_plain(resolve(self.target), self.values), RECEIVED, self.path)


def to_plain(value: Any) -> Any:
    """Turn dataclasses into mappings and enum members into their values, at any
    depth.
    """
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: Any, value: Any) -> Any:
    """Undo :func:`to_plain` for a value of the annotated type ``kind``."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(
            **{f.name: from_plain(hints[f.name], value[f.name]) for f in fields(kind) if f.init}
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)

    inner = [k for k in get_args(kind) if k is not type(None)]
    if value is None or not inner:
        return value
    if get_origin(kind) is dict:
        return {k: from_plain(inner[1], v) for k, v in value.items()}
    if get_origin(kind) in (list, tuple):
        return get_origin(kind)(from_plain(inner[0], v) for v in value)  # type: ignore[misc]
    return from_plain(inner[0], value) if len(inner) == 1 else value
