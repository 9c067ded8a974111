"""Describe a plugin in plain data, in a process that its code cannot leave."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pluggy
from packaging.specifiers import SpecifierSet

from coupler.errors import PluginError
from coupler.interfaces import API, EngineConfig, EnvironmentConfig, RolloutConfig
from coupler.plugins import hooks
from coupler.plugins.backend import VOCABULARY, Backend, Kind
from coupler.system.installed import open_entry, texts_in
from coupler.system.shapes import each_of, fits, shown
from coupler.system.words import did_you_mean

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
TARGET = re.compile(r"[\w./-]+:\w+")
TEXTS = {"kind": str, "name": str, "target": str}
CONFIG_BASES: Mapping[Kind, type] = {
    Kind.ENGINE: EngineConfig,
    Kind.ROLLOUT: RolloutConfig,
    Kind.ENVIRONMENT: EnvironmentConfig,
}
BACKEND = {**TEXTS, "serves": str, "api": int, "capabilities": [str], "tested": {str: str}}
SHAPE = {"hooks": [str], "backends": [BACKEND], "presets": [(str, str, str)], "files": [str]}


@dataclass(frozen=True, slots=True)
class Declared:
    """Declared is what a plugin says of one backend, with its default configuration."""

    kind: str
    name: str
    api: int
    target: str
    capabilities: tuple[str, ...]
    tested: Mapping[str, str]
    serves: str

    @property
    def unknown(self) -> Iterator[str]:
        """Yield a sentence for each capability that core does not know."""
        for name in sorted({*self.capabilities} - VOCABULARY):
            yield (
                f"{self.kind}={self.name} declares {name!r}, a capability that this core does "
                f"not know and never uses{did_you_mean(name, VOCABULARY)}"
            )


@dataclass(frozen=True, slots=True)
class Description:
    """Description is what core knows of a plugin without importing it.

    Attributes:
        hooks: the names of those that it implements.
        presets: kind, name and text of each.
    """

    hooks: tuple[str, ...]
    backends: tuple[Declared, ...]
    presets: tuple[tuple[str, str, str], ...] = ()

    @property
    def usable(self) -> bool:
        """Tell whether all backends are of a generation that core accepts."""
        return all(accepts(backend.api) for backend in self.backends)

    @classmethod
    def of(cls, plain: Any) -> Description:
        """Read what :func:`describe` says, or what somebody has written in its place.

        Raises:
            PluginError: it is something else.
        """
        if not fits(plain, SHAPE):
            raise PluginError("its description is damaged")
        presets = tuple((kind, name, text) for kind, name, text in plain["presets"])
        backends = tuple(Declared(**backend) for backend in plain["backends"])
        return cls(tuple(plain["hooks"]), backends, presets)


def accepts(api: int, current: int = API) -> bool:
    """Tell if a core of generation ``current`` runs backends of generation ``api``.

    It runs its own generation and the one before.
    """
    return max(1, current - 1) <= api <= current


def describe(value: str) -> dict[str, Any]:
    """Import a plugin, and return its description in plain data.

    ``value`` is that of an entry point. The description names the files of presets too.
    """
    module = open_entry(value)
    backends = [_described(backend) for backend in checked(module)]
    folders = (*Kind, "preset")
    texts = [each for name in packages_of(module) for each in texts_in(name, folders, ".yaml")]
    return {
        "hooks": [caller.name for caller in register(module).get_hookcallers(module) or ()],
        "backends": backends,
        "presets": [(str(folder), name, text) for folder, name, text, _ in texts if name],
        "files": [path for *_, path in texts],
    }


def register(module: ModuleType) -> Any:
    """Return a manager that knows this plugin only. Its mistakes are nobody else's."""
    alone: Any = pluggy.PluginManager("coupler")
    alone.add_hookspecs(hooks)
    alone.register(module)
    alone.check_pending()  # a misspelt hook
    return alone


def checked(module: ModuleType) -> list[Backend]:
    """Return the backends of a plugin.

    Raises:
        PluginError: one of them, or a hook, is not what it has to be.
    """
    callers = register(module).get_hookcallers(module)
    name = getattr(module, "__name__", repr(module))
    if not callers:
        raise PluginError(f"{name} implements no hook; mark its functions with @coupler.hookimpl")
    for caller in callers:
        if any(impl.hookwrapper or impl.wrapper for impl in caller.get_hookimpls()):
            raise PluginError(f"{caller.name} is a wrapper, and core calls none")

    backends = _listed(module, "coupler_backends", Backend)
    for backend in backends:
        _check(backend)
    names = [(str(b.kind), b.name) for b in backends]
    if twice := sorted({f"{kind}={name}" for kind, name in names if names.count((kind, name)) > 1}):
        raise PluginError(f"it declares {', '.join(twice)} twice")
    packages_of(module)
    return backends


def packages_of(module: ModuleType) -> list[str]:
    """Return the packages of presets that a plugin names."""
    packages = _listed(module, "coupler_config_paths", str)
    for package in packages:
        if find_spec(package) is None:
            raise PluginError(f"there is no package {package}, which coupler_config_paths names")
    return packages


def _listed(module: ModuleType, hook: str, kind: type[Any]) -> list[Any]:
    impls = getattr(register(module).hook, hook).get_hookimpls()
    return [each for impl in impls for each in each_of(hook, impl.function(), kind)]


def _check(backend: Backend) -> None:
    kind, name = _text(backend.kind, "kind"), _text(backend.name, "name")
    who = f"{kind}={name}"
    if kind not in set(Kind):
        raise PluginError(
            f"{who}: there is no kind {kind!r}, only {', '.join(Kind)}{did_you_mean(kind, Kind)}"
        )
    if not NAME.fullmatch(name):
        raise PluginError(f"{kind}={name!r}: a name has letters, digits and . _ + - of ASCII only")

    if type(backend.api) is not int:
        raise PluginError(f"{who}: its api is {shown(backend.api)}, and has to be a whole number")
    if not TARGET.fullmatch(_text(backend.target, "target")):
        raise PluginError(
            f"{who}: its target is {backend.target!r}; write it as package.module:Class"
        )
    if not isinstance(backend.tested, Mapping):
        raise PluginError(f"{who}: tested is {shown(backend.tested)}, and has to be a dict")
    for distribution, versions in backend.tested.items():
        _text(distribution, "tested")
        SpecifierSet(_text(versions, f"tested[{distribution!r}]"))
    backend.capabilities_of(_default_config(backend, who))


def _default_config(backend: Backend, who: str) -> Any:
    """Make the default configuration, which has to be one."""
    default: Any = backend.config()
    if not is_dataclass(default) or "name" not in {f.name for f in fields(default)}:
        raise PluginError(f"{who}: its config is not a dataclass with a field 'name'")
    if default.name != backend.name:  # type: ignore[attr-defined]
        raise PluginError(f"{who}: {backend.config.__name__}.name is {default.name!r}")  # type: ignore[attr-defined]

    base = CONFIG_BASES.get(Kind(backend.kind), object)
    if not isinstance(default, base):
        raise PluginError(
            f"{who}: its config class {backend.config.__name__} does not extend "
            f"coupler.{base.__name__}"
        )
    return default


def _described(backend: Backend) -> dict[str, Any]:
    return {
        "kind": _text(backend.kind, "kind"),
        "name": _text(backend.name, "name"),
        "api": backend.api,
        "target": _text(backend.target, "target"),
        "capabilities": sorted(map(str.__str__, backend.capabilities_of(backend.config()))),
        "tested": {_text(d, "tested"): _text(v, "tested") for d, v in backend.tested.items()},
        "serves": _text(backend.serves, "serves"),
    }


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise PluginError(f"a backend's {what} is {shown(value)}, and has to be text")
    return str.__str__(value)
