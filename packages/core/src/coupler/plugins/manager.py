"""Choose among installed plugins, and import those that a run selects."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pluggy

from coupler.errors import CouplerError, PluginError, place_of
from coupler.interfaces import API
from coupler.plugins import hooks
from coupler.plugins.backend import Backend
from coupler.plugins.description import Declared, Description, accepts, checked, describe
from coupler.system.contained import shortened
from coupler.system.discovery import Discovery, Reader, Source
from coupler.system.installed import open_entry
from coupler.system.shapes import each_of
from coupler.system.words import closest

__all__ = ["Plugins", "Row", "Source", "accepts"]

CORE = "coupler-core"
BUILTIN = "coupler.builtin.plugin"
# Distributions that bring a name, for the hint only. Nothing is installed from a guess.
BRINGS = {
    "coupler-engine-fsdp": "engine=fsdp rollout=hf",
    "coupler-engine-megatron": "engine=megatron",
    "coupler-rollout-vllm": "rollout=vllm",
    "coupler-rollout-sglang": "rollout=sglang",
    "coupler-algos": "algorithm=grpo algorithm=rloo algorithm=ppo algorithm=sft",
    "coupler-trackers": "tracker=wandb tracker=mlflow tracker=tensorboard tracker=trackio "
    "tracker=swanlab",
}
KNOWN = {tuple(one.split("=")): dist for dist, names in BRINGS.items() for one in names.split()}


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


class Plugins(Discovery):
    """Plugins chooses among the plugins of this interpreter.

    A name that core brings is core's. One that two other distributions declare is an
    error when it is selected, and a warning otherwise, since it cannot hurt a run that
    does not use the name. The same holds for a broken plugin and one of another API
    generation.

    A plugin is imported here when a backend of it is asked for, or one of its presets
    is chosen. A module of COUPLER_PLUGINS without backends is imported for its hooks.

    Attributes:
        imported: the backends of each plugin of the run.
    """

    def __init__(self) -> None:
        self.core = Source("coupler", CORE, version(CORE), BUILTIN)
        ours = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))

        super().__init__(
            Reader(
                group="coupler",
                target="coupler.plugins.description:describe",
                parse=Description.of,
                identity=(self.core.version, str(API)),
                files=ours,
                core=CORE,
            )
        )

        self._indexed: tuple[Any, dict[tuple[str, str], list[tuple[Declared, Source]]]] = (None, {})
        self._core = Description.of(describe(BUILTIN))
        self._manager = pluggy.PluginManager("coupler")
        self._manager.add_hookspecs(hooks)
        self.imported: dict[Source, dict[tuple[str, str], Backend]] = {}

    @classmethod
    def load(cls) -> Plugins:
        """Begin to read every installed plugin.

        None is imported here, and nothing that a plugin does raises.
        """
        return cls()

    @property
    def all(self) -> dict[Source, Description]:
        """Descriptions of core and of each plugin that was read."""
        return {self.core: self._core, **self.known}

    def complete(self) -> Plugins:
        """Wait until every plugin is read, or has used up its time."""
        self.wait(lambda: False)
        return self

    def find(self, kind: str, name: str) -> list[tuple[Declared, Source]]:
        """Return who declares a name, of what is read. Nobody takes one of core's."""
        found = self._index().get((kind, name), [])
        return [each for each in found if each[1].is_core][:1] or found

    def declared(self, kind: str) -> dict[str, Declared]:
        """Return what is known of the backends of one kind that can be selected."""
        self.wait(lambda: True)
        found = {name: self.find(k, name) for k, name in self._index() if k == kind}
        return {n: f[0][0] for n, f in found.items() if len(f) == 1 and accepts(f[0][0].api)}

    def owner_of(self, kind: str, name: str) -> Source | None:
        """Return who declares ``kind=name``, if anybody does."""
        self.wait(lambda: bool(self.find(kind, name)))
        return next((source for _, source in self.find(kind, name)), None)

    def of(self, kind: str) -> dict[str, Backend]:
        """Import the backends of one kind that can be selected, and return them by
        name.
        """
        found: dict[str, Backend] = {}
        for name in self.complete().declared(kind):
            try:
                found[name] = self.get(kind, name)
            except PluginError as error:
                self.broken[self.owner[kind, name]] = str(error).splitlines()[0]
        return found

    @property
    def owner(self) -> dict[tuple[str, str], Source]:
        """Owners of each (kind, name): core, or the first of several."""
        self.complete()
        return {key: self.find(*key)[0][1] for key in self._index()}

    def get(self, kind: str, name: str, also: tuple[str, ...] = ()) -> Backend:
        """Return the backend that the user selected, and import its plugin.

        ``also`` has further names that the user may mean.

        Raises:
            PluginError: it is missing, broken, of another API generation, or declared
                twice.
        """
        self.wait(lambda: bool(self.find(kind, name)))
        if not self.find(kind, name):
            self.read_again(lambda source: self._brings(source, kind, name))
        found = self.find(kind, name)
        if not found:
            raise PluginError(self.missing(kind, name, also))

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
        backends = self.use(source)
        if (kind, name) not in backends:
            if not self.find(kind, name):
                raise PluginError(self.missing(kind, name, also))
            raise PluginError(
                f"{source} declares {kind}={name} in another process, and not in this one.\n"
                f"  try:  {source.fix}"
            )
        return backends[kind, name]

    def use(self, source: Source) -> Mapping[tuple[str, str], Backend]:
        """Import a plugin of the run, and return its backends.

        Raises:
            PluginError: it cannot be imported.
        """
        if source not in self.imported:
            try:
                # What is printed belongs to no output of ours.
                with redirect_stdout(sys.stderr):
                    module = open_entry(source.module)
                    backends = checked(module)
            # third-party code may do anything; it is shown
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"the plugin {source} failed to load: "
                    f"{shortened(f'{type(error).__name__}: {error}')}.\n  try:  {source.fix}"
                ) from error

            # hooks of another generation are never called
            if all(accepts(b.api) for b in backends) and not self._manager.is_registered(module):
                self._manager.register(module, _key(source))
            self.imported[source] = {(str(b.kind), str(b.name)): b for b in backends}
            declared = {(b.kind, b.name) for b in self.all[source].backends}
            if declared != self.imported[source].keys():
                # What is remembered is of another environment.
                self.read_again(lambda _: False)
        return self.imported[source]

    def missing(self, kind: str, name: str, also: tuple[str, ...] = ()) -> str:
        """Say why ``kind=name`` cannot be had, and what to type.

        ``also`` has further names that the user may mean.
        """
        self.complete()
        source = next((s for s in self.broken if self._brings(s, kind, name)), None)
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
        lines, installed = [first], [*self.declared(kind), *also]
        known = {
            n: f"  (pip install {dist})"
            for (k, n), dist in KNOWN.items()
            if k == kind and n not in installed
        }
        for close in closest(name, [*installed, *known]):
            if close != name:
                lines.append(f"  did you mean: {kind}={close}{known.get(close, '')}")
        lines.append(f"  installed:  {', '.join(sorted(installed)) or 'none'}")

        lines += [f"  failed to load: {source}: {why}" for source, why in self.broken.items()]
        lines += [f"  disabled by COUPLER_DISABLE_PLUGINS: {source}" for source in self.disabled]
        lines += [f"  {text}" for text in self.stale]
        return "\n".join(lines)

    def warnings(self) -> list[str]:
        """Return a line for everything that is wrong with plugins nobody selected."""
        lines = [f"plugin {source} failed to load: {why}" for source, why in self.broken.items()]
        lines += [
            f"plugin {source} takes long to read, and was not waited for; coupler plugins waits"
            for source in self.late
        ]

        for row in self._rows():
            if row.state in ("duplicate", "incompatible"):
                line = f"{row.kind}={row.name} is {row.state}: {row.detail}"
                lines += [line] if line not in lines else []
        for source, description in self.known.items():
            lines += [
                f"the preset {kind}={name} of {source} is not used, since core brings that name"
                for kind, name, _ in description.presets
                if any(owner.is_core for _, owner in self.find(kind, name))
            ]
        return lines + self.stale

    def unknown(self, used: Iterable[tuple[str, str]] | None = None) -> Iterator[str]:
        """Yield a sentence for each capability that core does not know.

        ``used`` has pairs of kind and name, and None stands for all.
        """
        keys = None if used is None else set(used)
        for source, description in self.all.items():
            for each in description.backends:
                if keys is None or (each.kind, each.name) in keys:
                    yield from (f"{text} (plugin {source})" for text in each.unknown)

    def rows(self) -> list[Row]:
        """Return what is installed, and in which state, for ``coupler plugins``."""
        self.complete()
        return self._rows()

    def call(self, hook: str, owners: Iterable[Source] | None = None, /, **arguments: Any) -> Any:
        """Call a hook of core and of some owners, or of all plugins of the run.

        Returns:
            the answers that are not None, or the first one where a hook has one only.

        Raises:
            PluginError: a hook raised anything but a sentence for the user.
        """
        answers = (answer for _, answer in self.answers(hook, owners, **arguments))
        first = getattr(self._manager.hook, hook).spec.opts["firstresult"]
        return next(answers, None) if first else list(answers)

    def answers(
        self, hook: str, owners: Iterable[Source] | None = None, /, **arguments: Any
    ) -> Iterator[tuple[Source, Any]]:
        """Yield each plugin of :meth:`call` with its answer."""
        observers = self._observers()
        for source in (self.core, *observers):
            self.use(source)
        asked = {self.core, *observers, *(self.imported if owners is None else owners)}
        sources = {_key(source): source for source in asked}

        for impl in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            if (source := sources.get(impl.plugin_name)) is None:
                continue
            try:
                answer = impl.function(*(arguments[name] for name in impl.argnames))
                if isinstance(answer, Iterator):
                    answer = each_of(hook, answer, object)
            except CouplerError:
                raise
            # third-party code may do anything; it is shown
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"{hook} of a plugin raised {error!r}.\n  at:  {place_of(error)}\n"
                    f"  of:  {source}\n  try:  COUPLER_DISABLE_PLUGINS={source.name}"
                ) from error
            if answer is not None:
                yield source, answer

    def presets(self, kind: str, name: str = "") -> dict[str, list[tuple[Source, str]]]:
        """Return the text of every preset of one kind, with who ships it.

        One that is called ``name``, or a backend of that name, is waited for.
        """

        def have() -> dict[str, list[tuple[Source, str]]]:
            found: dict[str, list[tuple[Source, str]]] = {}
            for source, description in self.known.items():
                for of_kind, called, text in description.presets if description.usable else ():
                    if of_kind == kind:
                        found.setdefault(called, []).append((source, text))
            return found

        self.wait(lambda: not name or bool(self.find(kind, name)) or name in have())
        return have()

    def _observers(self) -> list[Source]:
        """Return modules of COUPLER_PLUGINS that no run can select: they have hooks."""
        self.wait(lambda: True)
        named = [(s, d) for s, d in self.known.items() if not s.distribution]
        return [s for s, d in named if not d.backends and not d.presets]

    def _rows(self) -> list[Row]:
        rows = []
        for (kind, name), found in sorted(self._index().items()):
            used = self.find(kind, name)
            for backend, source in found:
                state, detail = "available", ""
                if not accepts(backend.api):
                    state, detail = "incompatible", f"API generation {backend.api}, core has {API}"
                elif (backend, source) not in used:
                    state, detail = "duplicate", f"{used[0][1]} brings this name, and keeps it"
                elif len(used) > 1:
                    state, detail = (
                        "duplicate",
                        "declared by " + " and ".join(str(s) for _, s in found),
                    )
                able, of, number = backend.capabilities, source.distribution, source.version
                rows.append(Row(kind, name, state, of, number, able, detail))

        rows += [
            Row("", s.name, "broken", s.distribution, s.version, (), why)
            for s, why in self.broken.items()
        ]
        rows += [Row("", s.name, "disabled", s.distribution, s.version) for s in self.disabled]
        return rows

    def _index(self) -> dict[tuple[str, str], list[tuple[Declared, Source]]]:
        # It is made anew when something became known.
        if self._indexed[0] is not self.known:
            self._indexed = (self.known, {})
            for source, description in self.all.items():
                for each in description.backends:
                    key = (each.kind, each.name)
                    self._indexed[1].setdefault(key, []).append((each, source))
        return self._indexed[1]

    @staticmethod
    def _brings(source: Source, kind: str, name: str) -> bool:
        """Tell whether the name of a plugin says that it provides ``kind=name``."""
        wanted = {name, KNOWN.get((kind, name)), f"coupler-{kind}-{name}"}
        return bool(wanted & {source.name, source.distribution})


def _key(source: Source) -> str:
    return f"{source} {source.module}"


def _upgrade(api: int, source: Source) -> str:
    return f"pip install --upgrade {CORE}" if api > API else source.fix
