"""Turn names into objects, at once or when they are used."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from coupler.errors import CouplerError, place_of


def resolve(target: str) -> Any:
    """Import what ``"package.module:Name"`` or ``"path/to/file.py:name"`` names.

    Raises:
        CouplerError: the text has no colon, the file does not exist, or the module has
            no such name.
        ImportError: the module itself cannot be imported.
    """
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise CouplerError(
            f"{target!r} names nothing.\n  write it as:  package.module:name  or  "
            "path/to/file.py:name"
        )

    is_file = module_name.endswith(".py")
    module = _load_file(Path(module_name)) if is_file else import_module(module_name)
    try:
        return getattr(module, name)
    except AttributeError:
        public = sorted(n for n in vars(module) if not n.startswith("_"))
        raise CouplerError(
            f"{module_name} has no {name!r}.\n  it has:  {', '.join(public)}"
        ) from None


def load_subclass(target: str, base: type) -> type[Any]:
    """Import what a plugin names as its class, and check that it is one that can be
    made.

    Raises:
        CouplerError: it is missing or misspelt, its module does not import, or the
            class is abstract or of another type.
    """
    try:
        found = resolve(target)
    except CouplerError:
        raise
    except (Exception, SystemExit) as error:
        where = f"\n  at:  {place_of(error)}" if error.__traceback__ else ""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise CouplerError(f"{target} cannot be imported: {text}{where}") from error

    if not isinstance(found, type) or not issubclass(found, base):
        raise CouplerError(f"{target} is no subclass of coupler.{base.__name__}.")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise CouplerError(f"{target} is abstract: it does not implement {', '.join(missing)}.")
    return found


def misspelt(target: str) -> str:
    """Say what of ``"package.module:Name"`` cannot exist. Nothing of it is imported.

    The answer is empty where only an import can tell.
    """
    module, _, name = target.rpartition(":")
    try:
        spec, source, above = None, "", find_spec
        for part in accumulate(module.split("."), "{}.{}".format):
            # Code of a package may bring modules from elsewhere.
            if "__path__" in source:
                return ""
            if (spec := above(part)) is None:
                return f"there is no module {part}"
            file = Path(spec.origin or "")
            source = file.read_text() if file.suffix == ".py" else ""
            above = partial(PathFinder.find_spec, path=spec.submodule_search_locations or ())
    except Exception:  # finders and files of anybody; the import will say more
        return ""

    # Whatever names it may have made it, as a star or a __getattr__ may have.
    if not source or re.search(rf"\b{re.escape(name)}\b|__getattr__|import\s+\(?\*", source):
        return ""
    close = get_close_matches(name, re.findall(r"^class (\w+)", source, re.MULTILINE), n=1)
    return f"{module} has no {name!r}{f'; did you mean {close[0]!r}?' if close else ''}"


def file_of(target: str) -> Path | None:
    """Return the file that :func:`resolve` would import, or that of its package.

    Nothing is imported.
    """
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    spec = find_spec(module.partition(".")[0]) if module else None
    return Path(spec.origin) if spec and spec.origin else None


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise CouplerError(f"there is no file {path}.\n  it is looked up from:  {Path.cwd()}")
    spec = spec_from_file_location(f"coupler_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def present(name: str, brought_by: str) -> ModuleType:
    """Import a package that core does not depend on.

    Raises:
        CouplerError: it is not installed. The message says that ``pip install
            brought_by`` installs it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = name.partition(".")[0]
        if error.name != missing:
            raise
        raise CouplerError(
            f"{missing} is not installed.\n  try:  pip install '{brought_by}'"
        ) from None


class Late:
    """Stands for a package in a module that must load without it.

    The package is imported when something of it is asked for.

    Example:
        ``torch = Late("torch", "coupler-core[fsdp]")`` stands in the place of ``import
        torch``, which type checkers see.
    """

    def __init__(self, name: str, brought_by: str) -> None:
        self._name, self._brought_by = name, brought_by

    def __getattr__(self, name: str) -> Any:
        """Raises CouplerError: the package is not installed."""
        # Pickle and inspect ask every object for such names.
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(present(self._name, self._brought_by), name)
        # The next time nothing is looked for.
        setattr(self, name, found)
        return found
