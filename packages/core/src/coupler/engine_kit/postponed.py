"""Import a library without what it imports and hardly ever uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """A module that is imported when an attribute of it is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


@contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Let imports within the block bind modules that are imported at their first use.

    What has such a module afterwards can use it as ever. Every later import of it finds
    the true one. A module that is there already stays as it is.

    Args:
        names: ``package.module``, or ``package.module:function`` where the library
            imports the function from it. A package that is given is a module before
            its own.
    """
    for each in names:
        name, _, function = each.partition(":")
        if name in sys.modules:
            continue
        later = sys.modules[name] = _Later(name)
        if function:
            setattr(later, function, partial(_call, name, function))
        package, _, inner = name.rpartition(".")
        if isinstance(parent := sys.modules.get(package), _Later):
            setattr(parent, inner, later)

    try:
        yield
    finally:
        _take_away()


def _call(module: str, function: str, *args: Any, **keywords: Any) -> Any:
    return getattr(_real(module), function)(*args, **keywords)


def _real(name: str) -> ModuleType:
    _take_away()
    return import_module(name)


def _take_away() -> None:
    """Take all stand-ins out of the table of modules, so that imports find the true
    ones.
    """
    for name, module in list(sys.modules.items()):
        if isinstance(module, _Later):
            del sys.modules[name]
