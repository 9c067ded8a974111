"""Send calls and answers over a socket as JSON and raw arrays. Nothing is unpickled.

A message is the length of its header (8 bytes, big endian), the header, which is JSON,
and the arrays that it announces, one after the other.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from coupler.system.gate import LENGTH
from coupler.system.imports import resolve

MAX_HEADER = 1 << 28
MAX_ARRAY = 1 << 36  # bytes
# Only classes of core are made of what a message says.
OURS = "coupler."
PLAIN = (str, int, float, bool, type(None))


@runtime_checkable
class Sent(Protocol):
    """A dataclass with a form of its own on the way, and a class method ``received``
    that undoes it.
    """

    def sent(self) -> dict[str, Any]:
        """Return its values by name."""
        ...


def send(to: socket.socket, value: Any) -> None:
    """Send a value: plain ones, lists, tuples, sets, mappings, paths, arrays without
    objects, and members of enums and dataclasses of core.

    Raises:
        TypeError: it is another one, or holds one.
    """
    arrays: list[np.ndarray] = []
    header = json.dumps(_told(value, arrays)).encode()
    to.sendall(LENGTH.pack(len(header)) + header)
    for array in arrays:
        to.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def receive(source: socket.socket) -> Any:
    """Return the next value.

    Raises:
        ConnectionError: the other side has closed the connection.
        ValueError: what came is no message.
    """
    (length,) = LENGTH.unpack(_read(source, LENGTH.size).tobytes())
    if length > MAX_HEADER:
        raise ValueError(f"a header of {length} bytes")
    return _made(json.loads(_read(source, length).tobytes()), source)


def _told(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return JSON of a value, and append the arrays that it holds, in order."""
    if isinstance(value, Enum):
        return {"enum": _target(value), "value": value.value}
    if type(value) in PLAIN:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufSU":
        arrays.append(value)
        return {"array": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, list | tuple | frozenset):
        kind = "frozenset" if isinstance(value, frozenset) else type(value).__name__
        return {kind: [_told(inner, arrays) for inner in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_told(k, arrays), _told(v, arrays)] for k, v in value.items()]}

    if is_dataclass(value):
        sent = value.sent() if isinstance(value, Sent) else _values(value)
        return {"is": _target(value), "of": [[k, _told(v, arrays)] for k, v in sent.items()]}
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _made(told: Any, source: socket.socket) -> Any:
    """Undo :func:`_told`. Arrays come from ``source`` in the order of the header."""
    if not isinstance(told, dict):
        return told

    match told:
        case {"enum": target, "value": value}:
            return _class(target, Enum)(value)
        case {"array": dtype, "shape": shape}:
            return _array(source, np.dtype(dtype), tuple(shape))
        case {"path": text}:
            return Path(text)
        case {"list": inner}:
            return [_made(each, source) for each in inner]
        case {"tuple": inner}:
            return tuple(_made(each, source) for each in inner)
        case {"frozenset": inner}:
            return frozenset(_made(each, source) for each in inner)
        case {"dict": pairs}:
            return {_made(key, source): _made(value, source) for key, value in pairs}
        case {"is": target, "of": pairs}:
            values = {name: _made(value, source) for name, value in pairs}
            made = _class(target, object)
            return made.received(values) if hasattr(made, "received") else made(**values)
    raise ValueError(f"no message has the keys {sorted(told)}")


def _values(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _target(value: Any) -> str:
    kind = type(value)
    target = f"{kind.__module__}:{kind.__qualname__}"
    if not target.startswith(OURS):
        raise TypeError(f"a {target} cannot be sent to another process")
    return target


def _class(target: str, base: type) -> Any:
    """Return a dataclass or an enum of core.

    Raises:
        ValueError: it is none.
    """
    found = resolve(target) if target.startswith(OURS) else None
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(f"{target} is no class of a message")
    if not (is_dataclass(found) or issubclass(found, Enum)):
        raise ValueError(f"{target} is no class of a message")
    return found


def _array(source: socket.socket, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    size = dtype.itemsize * prod(shape)
    if dtype.hasobject or not 0 <= size <= MAX_ARRAY:
        raise ValueError(f"an array of {dtype} and {shape}")
    return _read(source, size).view(dtype).reshape(shape)


def _read(source: socket.socket, count: int) -> np.ndarray:
    """Read so many bytes, [count] uint8.

    Raises:
        ConnectionError: the other side has closed the connection.
    """
    data = np.empty(count, np.uint8)
    rest = memoryview(data.data)
    while rest:
        got = source.recv_into(rest)
        if not got:
            raise ConnectionError("it closed the connection")
        rest = rest[got:]
    return data
