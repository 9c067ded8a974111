"""Find installed plugins without importing a backend.

A broken plugin stops only the runs that select it.

A plugin is an entry point of the group ``coupler`` whose value is a module, for example
``acme = "coupler_engine_acme.plugin"``. ``COUPLER_PLUGINS=module,...`` adds modules
without packaging, and ``COUPLER_DISABLE_PLUGINS=name,...`` leaves entry points or
distributions out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pluggy

from coupler.errors import CouplerError, PluginError, place_of
from coupler.interfaces import API, EngineConfig, RolloutConfig
from coupler.plugins import hooks
from coupler.plugins.backend import Backend, Kind

GROUP = "coupler"
CORE = "coupler-core"
# Distributions that bring a name, for the hint only. Nothing is installed from a guess.
KNOWN = {
    ("engine", "fsdp"): "coupler-engine-fsdp",
    ("engine", "megatron"): "coupler-engine-megatron",
    ("rollout", "hf"): "coupler-engine-fsdp",
    ("rollout", "vllm"): "coupler-rollout-vllm",
    ("rollout", "sglang"): "coupler-rollout-sglang",
    ("algorithm", "grpo"): "coupler-algos",
    ("algorithm", "rloo"): "coupler-algos",
    ("algorithm", "ppo"): "coupler-algos",
    ("algorithm", "sft"): "coupler-algos",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Source is the origin of a plugin: an entry point, or a module.

    Attributes:
        name: of the entry point, or of the module that COUPLER_PLUGINS names.
        distribution: empty for a module that COUPLER_PLUGINS names.
    """

    name: str
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        if not self.distribution:
            return f"{self.name} (module)"
        return f"{self.name} ({self.distribution} {self.version})"

    @property
    def fix(self) -> str:
        """Return the command to type when this plugin does not load.

        pip also brings a missing dependency of it.
        """
        if not self.distribution:
            return f"correct the module {self.name}, or take it out of COUPLER_PLUGINS"
        return f"pip install --upgrade {self.distribution}"


@dataclass(frozen=True, slots=True)
class Row:
    """Row is one line of ``coupler plugins``.

    A plugin that did not load has no kind, since its backends are unknown. ``state`` is
    available, duplicate, incompatible, broken or disabled.
    """

    kind: str
    name: str
    state: str
    distribution: str
    version: str
    capabilities: tuple[str, ...] = ()
    detail: str = ""


def accepts(api: int, current: int = API) -> bool:
    """Tell if a core of generation ``current`` runs backends of generation ``api``.

    It runs its own generation and the one before.
    """
    return max(1, current - 1) <= api <= current


class Plugins:
    """Plugins holds every plugin of this interpreter.

    A name that two distributions declare is an error when it is selected, and a warning
    otherwise, since it cannot hurt a run that does not use the name. The same holds for
    a broken plugin and one of another API generation.

    Attributes:
        owner: who declares a (kind, name); the first one, where several do.
        broken: why a plugin did not load.
        disabled: what COUPLER_DISABLE_PLUGINS left out.
        stale: a sentence for each second installation of a plugin, which Python does
            not use.
    """

    def __init__(self) -> None:
        self.manager: Any = _manager()
        self.core = Source("coupler", CORE, version(CORE))
        self.owner: dict[tuple[str, str], Source] = {}
        self.broken: dict[Source, BaseException] = {}
        self.disabled: list[Source] = []
        self._declared: dict[tuple[str, str], list[tuple[Backend, Source]]] = {}
        self.stale: list[str] = []

    @classmethod
    def load(cls) -> Plugins:
        """Import the plugin module of every installed distribution.

        No backend is imported, and nothing that a plugin does raises.
        """
        self = cls()
        self._register(self.core, *_checked(import_module("coupler.builtin.plugin")))
        blocked = set(_names_in("COUPLER_DISABLE_PLUGINS"))
        for source, entry in self._entry_points():
            if blocked & {source.name, source.distribution}:
                self.disabled.append(source)
            else:
                self._add(source, entry.load)
        for module in _names_in("COUPLER_PLUGINS"):
            self._add(Source(module), lambda module=module: import_module(module))
        return self

    def of(self, kind: str) -> dict[str, Backend]:
        """Return the backends of one kind that can be selected, by name."""
        usable = {name: found for (k, name), found in self._declared.items() if k == kind}
        return {
            n: found[0][0]
            for n, found in usable.items()
            if len(found) == 1 and accepts(found[0][0].api)
        }

    def get(self, kind: str, name: str) -> Backend:
        """Return the backend that the user selected.

        Raises:
            PluginError: it is missing, broken, of another API generation, or declared
                twice.
        """
        found = self._declared.get((kind, name), [])
        if not found:
            raise PluginError(self.missing(kind, name))
        backend, source = found[0]
        if len(found) > 1:
            owners = " and ".join(str(s) for _, s in found)
            raise PluginError(
                f"two plugins provide {kind}={name}: {owners}.\n"
                "  try:  pip uninstall one of them, or set "
                f"COUPLER_DISABLE_PLUGINS={found[-1][1].name}"
            )
        if not accepts(backend.api):
            raise PluginError(
                f"{kind}={name} of {source} is written for API generation {backend.api}; "
                f"this core is of generation {API}.\n  try:  {_upgrade(backend.api, source)}"
            )
        return backend

    def missing(self, kind: str, name: str, also: tuple[str, ...] = ()) -> str:
        """Say why ``kind=name`` cannot be had, and what to type.

        ``also`` has further names that the user may mean.
        """
        source = self._suspect(kind, name)
        if source is not None:
            first = (
                f"{kind}={name} cannot be used: the plugin {source} failed to load.\n  "
                f"try:        {source.fix}"
            )
        elif (kind, name) in KNOWN:
            first = (
                f"no {kind} named {name!r} is installed.\n  try:        pip install "
                f"{KNOWN[kind, name]}"
            )
        else:
            first = f"no {kind} named {name!r} is installed."
        lines, installed = [first], [*self.of(kind), *also]
        known = {
            n: f"  (pip install {dist})"
            for (k, n), dist in KNOWN.items()
            if k == kind and n not in installed
        }
        for close in get_close_matches(name, [*installed, *known], n=1):
            if close != name:
                lines.append(f"  did you mean: {kind}={close}{known.get(close, '')}")
        lines.append(f"  installed:  {', '.join(sorted(installed)) or 'none'}")
        lines += [
            f"  failed to load: {source}: {_cause(exc)}" for source, exc in self.broken.items()
        ]
        lines += [f"  disabled by COUPLER_DISABLE_PLUGINS: {source}" for source in self.disabled]
        lines += [f"  {text}" for text in self.stale]
        return "\n".join(lines)

    def warnings(self) -> list[str]:
        """Return a line for everything that is wrong with plugins nobody selected."""
        lines = [
            f"plugin {source} failed to load: {_cause(exc)}" for source, exc in self.broken.items()
        ]
        for row in self.rows():
            if row.state in ("duplicate", "incompatible"):
                line = f"{row.kind}={row.name} is {row.state}: {row.detail}"
                lines += [line] if line not in lines else []
        return lines + self.stale

    def rows(self) -> list[Row]:
        """Return what is installed, and in which state, for ``coupler plugins``."""
        rows = []
        for (kind, name), found in sorted(self._declared.items()):
            for backend, source in found:
                state, detail = "available", ""
                if not accepts(backend.api):
                    state, detail = "incompatible", f"API generation {backend.api}, core has {API}"
                elif len(found) > 1:
                    state, detail = (
                        "duplicate",
                        "declared by " + " and ".join(str(s) for _, s in found),
                    )
                capabilities = tuple(sorted(backend.capabilities_of(backend.config())))
                rows.append(
                    Row(
                        kind, name, state, source.distribution, source.version, capabilities, detail
                    )
                )
        rows += [
            Row("", s.name, "broken", s.distribution, s.version, (), _cause(e))
            for s, e in self.broken.items()
        ]
        rows += [Row("", s.name, "disabled", s.distribution, s.version) for s in self.disabled]
        return rows

    def call(self, hook: str, owners: Iterable[Source] | None = None, /, **arguments: Any) -> Any:
        """Call a hook of core and of some owners, or of all usable plugins.

        Raises:
            PluginError: a hook raised anything but a sentence for the user.
        """
        keep = {str(source) for source in (*(owners or ()), self.core)}
        others = [module for key, module in self.manager.list_name_plugin() if key not in keep]
        try:
            return self.manager.subset_hook_caller(hook, others if owners is not None else ())(
                **arguments
            )
        except CouplerError:
            raise
        # third-party code may do anything; it is shown
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{hook} of a plugin raised {error!r}.\n  at:  {place_of(error)}\n"
                "  try:  COUPLER_DISABLE_PLUGINS=NAME, with a name of:  coupler plugins"
            ) from error

    def config_packages(self) -> list[tuple[str, Source]]:
        """Return the packages of YAML presets, each with its owner."""
        sources = {str(s): s for s in self.owner.values()}
        impls = self.manager.hook.coupler_config_paths.get_hookimpls()
        return [
            (p, sources.get(i.plugin_name, Source(i.plugin_name)))
            for i in impls
            for p in i.function()
        ]

    def _entry_points(self) -> Iterator[tuple[Source, EntryPoint]]:
        """Yield the entry points of the group.

        Of a distribution that is installed twice, only those that Python uses count.
        """
        first: dict[str, Distribution] = {}
        for dist in distributions():
            entries = [e for e in dist.entry_points if e.group == GROUP]
            if not entries:
                continue
            name, where = dist.metadata["Name"], str(dist.locate_file(""))
            used = first.setdefault(name.lower().replace("_", "-"), dist)
            if used is dist:
                yield from ((Source(e.name, name, dist.version), e) for e in entries)
            elif (where, dist.version) != (str(used.locate_file("")), used.version):
                self.stale.append(
                    f"{name} is installed twice: {used.version} in {used.locate_file('')} is used, "
                    f"{dist.version} in {where} is not"
                )

    def _add(self, source: Source, load: Callable[[], ModuleType]) -> None:
        """Register one plugin, or keep the error that prevents it."""
        try:
            module, backends = _checked(load())
        # third-party code may do anything; it is shown
        except (Exception, SystemExit) as exc:
            self.broken[source] = exc
        else:
            self._register(source, module, backends)

    def _register(self, source: Source, module: ModuleType, backends: list[Backend]) -> None:
        # hooks of another generation are never called
        if all(accepts(b.api) for b in backends):
            self.manager.register(module, str(source))
        for backend in backends:
            key = (backend.kind, backend.name)
            self._declared.setdefault(key, []).append((backend, source))
            self.owner.setdefault(key, source)

    def _suspect(self, kind: str, name: str) -> Source | None:
        """Return the broken plugin whose name says that it provides ``kind=name``."""
        wanted = {name, KNOWN.get((kind, name)), f"coupler-{kind}-{name}"}
        return next((s for s in self.broken if wanted & {s.name, s.distribution}), None)


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("coupler")
    manager.add_hookspecs(hooks)
    return manager


def _checked(module: ModuleType) -> tuple[ModuleType, list[Backend]]:
    """Check a plugin module on its own, and return it with its backends.

    A mistake in it is then nobody else's.
    """
    alone = _manager()
    alone.register(module)
    alone.check_pending()  # a misspelt hook
    if not alone.get_hookcallers(module):
        raise PluginError(
            f"{module.__name__} implements no hook; mark its functions with @coupler.hookimpl"
        )
    backends = [backend for found in alone.hook.coupler_backends() for backend in found]
    for backend in backends:
        _check(backend)
    for package in (p for found in alone.hook.coupler_config_paths() for p in found):
        if find_spec(package) is None:
            raise PluginError(f"there is no package {package}, which coupler_config_paths names")
    return module, backends


def _check(backend: Backend) -> None:
    who = f"{backend.kind}={backend.name}"
    if backend.kind not in set(Kind):
        raise PluginError(f"{who}: there is no kind {backend.kind!r}, only {', '.join(Kind)}")
    default: Any = backend.config()
    if not is_dataclass(default) or "name" not in {f.name for f in fields(default)}:
        raise PluginError(f"{who}: its config is not a dataclass with a field 'name'")
    if default.name != backend.name:  # type: ignore[attr-defined]
        raise PluginError(f"{who}: {backend.config.__name__}.name is {default.name!r}")  # type: ignore[attr-defined]
    base = {Kind.ENGINE: EngineConfig, Kind.ROLLOUT: RolloutConfig}.get(Kind(backend.kind), object)
    if not isinstance(default, base):
        raise PluginError(
            f"{who}: its config class {backend.config.__name__} does not extend "
            f"coupler.{base.__name__}"
        )
    backend.capabilities_of(default)


def _names_in(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def _cause(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}".splitlines()[0]


def _upgrade(api: int, source: Source) -> str:
    return f"pip install --upgrade {CORE}" if api > API else source.fix
