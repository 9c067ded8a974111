"""Look for what ``package.module:name`` names, without importing it."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from coupler.system.files import DamagedFile, read_bytes

MAX_SOURCE_BYTES = 4 << 20
# A module with one of these may have names that its source does not show.
DYNAMIC = frozenset({"globals", "exec", "setattr", "__getattr__", "vars", "exit", "quit"})
USED, IMPORTED = "cannot be used: ", "cannot be imported: "
# Gets the names of all parameters, of those without a default, and whether there are
# **keywords.
Misfit = Callable[[frozenset[str], frozenset[str], bool], str]
DEFINES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def target_problem(
    target: str,
    misfit: Misfit | None = None,
    places: tuple[str, ...] = (),
) -> str:
    """Return why ``target`` cannot be called, or an empty text where it may be.

    Nothing is imported, so only what the source shows is known. The text is of whole
    sentences and starts with :data:`USED` or :data:`IMPORTED`.

    Args:
        misfit: says why the caller cannot call a function with the parameters that it
            is given, and is empty where it can. None where that is not checked.
        places: folders where modules are looked for beside ``sys.path``.
    """
    module, colon, name = target.rpartition(":")
    if not colon or not module.strip() or not name.isidentifier():
        return (
            f"{USED}{target!r} names nothing.\n  write it as:  package.module:name  or  "
            "path/to/file.py:name"
        )
    if module in sys.modules:
        known = vars(sys.modules[module])
        if name in known:
            return "" if callable(known[name]) else f"{USED}{name} of {module} is no function."
        if "__getattr__" in known:
            return ""
        return f"{USED}{module} has no {name!r}.\n  it has:  {_public(known)}"

    if module.endswith(".py") and not os.path.lexists(module):
        return f"{USED}there is no file {module[:200]}.\n  it is looked up from:  {Path.cwd()}"
    try:
        path = Path(module) if module.endswith(".py") else _source_of(module, places)
        return "" if path is None else _problem_in(path, name, misfit, places)
    except DamagedFile as error:
        return f"{USED}{error}"
    except LookupError as error:
        return f"{IMPORTED}{error.args[0]}."


def _source_of(module: str, also: tuple[str, ...]) -> Path | None:
    """Return the source of a module, or None where it has none to read.

    Raises:
        LookupError: there is no such module.
    """
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise LookupError(f"{module!r} is no name of a module; a file ends in .py")
    if parts[0] in sys.builtin_module_names or module in sys.modules:
        return None

    places: Sequence[str] | None = [*also, *sys.path]
    spec = None
    for at in range(1, len(parts) + 1):
        name = ".".join(parts[:at])
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            # Editable installations and import hooks bring finders of their own.
            others = (finder for finder in sys.meta_path if finder is not PathFinder)
            found = (_ask(finder, name, places if at > 1 else None) for finder in others)
            spec = next((each for each in found if each is not None), None)
        if spec is None:
            raise LookupError(f"No module named {name!r}")
        places = spec.submodule_search_locations
        if places is None and at < len(parts):
            raise LookupError(f"{name} is a module, and has none inside")

    if spec and spec.origin is None and spec.submodule_search_locations is not None:
        raise LookupError(f"{module} is a folder without __init__.py")
    origin = spec.origin if spec and spec.has_location else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _ask(finder: object, name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    find = getattr(finder, "find_spec", None)
    return find(name, places) if find else None


def _problem_in(path: Path, name: str, misfit: Misfit | None, places: tuple[str, ...]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(read_bytes(path, MAX_SOURCE_BYTES), str(path))
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}"
        return f"{IMPORTED}{type(error).__name__}: {error.msg}.\n  at:  {where}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{IMPORTED}{type(error).__name__}: {error}.\n  at:  {path}"

    made: dict[str, ast.AST | None] = {}
    for names, by in _definitions(tree.body):
        for each in names:
            made[each] = by
            if isinstance(by, ast.Delete):
                del made[each]
    if _is_dynamic(tree):
        return ""
    if missing := _missing_import(tree, places):
        return f"{IMPORTED}ModuleNotFoundError: {missing[0]}.\n  at:  {path}, line {missing[1]}"
    if "*" in made:
        return ""
    if name not in made:
        return f"{USED}{path} has no {name!r}.\n  it has:  {_public(made)}"
    why = _misfit(made[name], path, name, misfit)
    return f"{USED}{why}." if why else ""


def _public(names: Iterable[str]) -> str:
    return ", ".join(sorted(name for name in names if not name.startswith("_"))[:20]) or "nothing"


def _missing_import(tree: ast.Module, places: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the first package that a module always imports and that is not there, with
    the line.
    """
    moves = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    if any(node.attr in ("path", "meta_path", "modules") for node in moves):
        return None

    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            try:
                _source_of(name.partition(".")[0], places)
            except LookupError as error:
                return str(error.args[0]), node.lineno
    return None


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[list[str], ast.AST | None]]:
    """Yield the names that the statements of a module bind, with what they are bound to
    where that is plain.
    """
    for node in body:
        if isinstance(node, DEFINES):
            yield [node.name], node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield [(a.asname or a.name).partition(".")[0] or a.name for a in node.names], None
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            yield _stored(node.targets[0]), node.value
        elif isinstance(node, ast.Delete):
            yield _stored(node), node

        else:
            inner = [
                statement
                for field in ("body", "orelse", "finalbody")
                for statement in getattr(node, field, ())
            ]
            cases = [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]
            inner += [statement for case in cases for statement in case.body]
            # Which branch runs is not known.
            yield from ((names, None) for names, _ in _definitions(inner))
            if not inner or isinstance(node, ast.For | ast.With):
                yield _stored(node), None


def _stored(node: ast.AST) -> list[str]:
    return [
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store | ast.Del)
    ]


def _is_dynamic(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id in DYNAMIC)
        or (isinstance(node, DEFINES) and node.name in DYNAMIC)
        or isinstance(node, ast.Global)
        for node in ast.walk(tree)
    )


def _misfit(node: ast.AST | None, path: Path, name: str, misfit: Misfit | None) -> str:
    """Return why what a name is bound to cannot be called."""
    plain = ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Set | ast.JoinedStr
    if isinstance(node, plain):
        return f"{name} of {path} is no function"
    defined = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if not defined or node.decorator_list or misfit is None:
        return ""

    given = node.args
    positional = [*given.posonlyargs, *given.args]
    required = {each.arg for each in positional[: len(positional) - len(given.defaults)]}
    required |= {
        each.arg
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if default is None
    }
    takes = frozenset(each.arg for each in (*given.args, *given.kwonlyargs))
    why = misfit(takes, frozenset(required), given.kwarg is not None)
    return f"{name} of {path} {why}" if why else ""
