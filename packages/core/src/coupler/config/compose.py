"""Compose one typed configuration: command line over the user's YAML over a plugin's preset over dataclass defaults.

``engine``, ``rollout`` and ``algorithm`` are chosen by name (``engine=fsdp`` on the command line; ``engine: fsdp`` or
``engine: {name: fsdp, lr: 1e-6}`` in YAML). A name is a backend's, or a YAML preset's that a plugin ships. Where the
command line chooses another name than the file, the file's section was written for something else and is not used.

Hydra composes presets. What comes out is merged once more onto the pristine dataclasses, because Hydra accepts
``+unknown=1`` even under a schema and OmegaConf then drops it silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from importlib.resources import files
from typing import Any, TypeVar

from hydra import compose as hydra_compose
from hydra import initialize
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins as HydraPlugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from coupler.config.options import SECTIONS, Options, flatten, wrong_value
from coupler.config.overrides import merge, nest, parse_overrides, read_file
from coupler.config.plain import to_plain
from coupler.config.schema import JOBS, Job, RunConfig, problems
from coupler.errors import ConfigError, PluginError
from coupler.interfaces import InFlight
from coupler.plugins.backend import Kind
from coupler.plugins.manager import Plugins, Source

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A checked configuration, and where its values come from."""

    config: RunConfig  # its engine, rollout and algorithm are instances of the plugins' dataclasses, or None
    origin: Mapping[str, str]  # full key -> "command line", the file's path, or "preset <name>"; defaults are not in it
    notes: tuple[str, ...] = ()  # what a user should know before the run starts
    options: Options

    @property
    def set_keys(self) -> list[str]:
        """Keys that the user set, on the command line or in the file."""
        return [key for key, origin in self.origin.items() if not origin.startswith("preset ")]


def compose(
    plugins: Plugins,
    overrides: list[str],
    config_file: str | None = None,
    job: Job = Job.TRAIN,
    *,
    complete: bool = True,
) -> Composed:
    """Compose and check the configuration of a job.

    Args:
        complete: False to look at a configuration that cannot run yet: sections may be missing and values out of range.

    Raises:
        ConfigError: a key is unknown, of the wrong type or out of range, or a required one is empty.
        PluginError: what a section names is not installed, is broken, or is ambiguous.
    """
    typed = nest(parse_overrides(overrides))
    written = read_file(config_file) if config_file else {}
    notes: list[str] = []
    choices = {}
    for kind in SECTIONS:
        name = _choose(kind, typed, written, config_file or "", notes)
        if name:
            choices[kind] = name
        elif (complete and kind in JOBS[job]) or kind in typed or kind in written:
            names = ", ".join(sorted([*plugins.of(kind), *_presets(plugins, kind)])) or "none"
            raise ConfigError(f"{kind} is not chosen.\n  try:  {kind}=NAME\n  installed:  {names}")
    base = _base(plugins, choices)
    backends = {kind: plugins.get(kind, _backend_name(base, kind, name)) for kind, name in choices.items()}
    options = Options({kind: backend.config for kind, backend in backends.items()})
    config = _build(options, merge(merge(base, written), typed))
    if complete:
        _check(plugins, config, job)
    for kind in choices:
        extra = options.table.get(f"{kind}.extra_args")
        given = getattr(config, kind).extra_args if extra else {}
        notes += [f"{kind}.extra_args is passed through unchecked: {', '.join(given)}"] if given else []
    origin = _preset_origin(base, choices, options)
    origin |= dict.fromkeys(flatten(written), config_file or "") | dict.fromkeys(flatten(typed), "command line")
    return Composed(config=config, origin=origin, notes=tuple(notes), options=options)


def plain(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain data: no dataclasses, no enums."""
    return to_plain(config)


def dump_yaml(config: RunConfig) -> str:
    """Write the configuration as YAML that composes to the same one again, with ``--config``."""
    values = {k: v for k, v in plain(config).items() if v is not None or k not in SECTIONS}
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(values)))


def _choose(kind: str, typed: dict[str, Any], written: dict[str, Any], file: str, notes: list[str]) -> str:
    """Take the choice of ``kind`` out of both layers, and a section of the file that is for another choice with it."""
    typed_name, written_name = _take_name(kind, typed), _take_name(kind, written)
    if typed_name and written_name and typed_name != written_name and kind in written:
        del written[kind]
        notes.append(f"{file}: section {kind} is for {written_name} and not used, {kind}={typed_name} was chosen")
    return typed_name or written_name


def _take_name(kind: str, layer: dict[str, Any]) -> str:
    section = layer.pop(kind, None)
    if isinstance(section, Mapping):
        name = section.get("name")
        rest = {key: value for key, value in section.items() if key != "name"}
        if rest:
            layer[kind] = rest
    else:
        name = section
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{kind} takes the name of a plugin's backend or preset, got {name!r}.")
    return name or ""


class _PresetPackages(SearchPathPlugin):
    """Hands the plugins' packages of YAML presets to Hydra. Hydra creates it, so what it says is set on the class."""

    packages: tuple[str, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for package in self.packages:
            search_path.append(provider=package, path=f"pkg://{package}")


def _base(plugins: Plugins, choices: Mapping[str, str]) -> dict[str, Any]:
    """Let Hydra compose the chosen backends' defaults and presets."""
    store = ConfigStore.instance()
    store.store(name="coupler", node={"defaults": ["_self_", *({kind: None} for kind in choices)]})
    for kind, name in choices.items():
        _locate(plugins, kind, name)
        for backend in plugins.of(kind).values():
            store.store(group=kind, name=backend.name, node=to_plain(backend.config()), provider=backend.target)
    _PresetPackages.packages = tuple(package for package, _ in plugins.config_packages())
    HydraPlugins.instance().register(_PresetPackages)
    try:
        with initialize(config_path=None, version_base="1.3"):
            composed = hydra_compose("coupler", overrides=[f"{kind}={name}" for kind, name in choices.items()])
        return OmegaConf.to_container(composed)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as exc:
        chosen = ", ".join(f"{kind}={name}" for kind, name in choices.items())
        raise PluginError(f"a preset among {chosen} cannot be composed: {str(exc).splitlines()[0]}") from None


def _presets(plugins: Plugins, kind: str) -> dict[str, list[Source]]:
    found: dict[str, list[Source]] = {}
    for package, source in plugins.config_packages():
        folder = files(package).joinpath(kind)
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.name.endswith(".yaml"):
                found.setdefault(file.name.removesuffix(".yaml"), []).append(source)
    return found


def _locate(plugins: Plugins, kind: str, name: str) -> None:
    """Check that exactly one backend or preset is called so."""
    presets = _presets(plugins, kind)
    if name not in presets:
        if name not in plugins.of(kind) and (kind, name) not in plugins.owner:
            raise PluginError(plugins.missing(kind, name, also=tuple(presets)))
        plugins.get(kind, name)
        return
    owners = presets[name] + ([plugins.owner[kind, name]] if (kind, name) in plugins.owner else [])
    if len(owners) > 1:
        raise PluginError(
            f"{kind}={name} has several meanings, from {' and '.join(map(str, owners))}.\n"
            f"  try:  COUPLER_DISABLE_PLUGINS={owners[-1].name}"
        )


def _backend_name(base: Mapping[str, Any], kind: str, choice: str) -> str:
    name = (base[kind] or {}).get("name")
    if not name:
        raise PluginError(f"the preset {kind}={choice} does not say which backend it is for; it needs a 'name'.")
    return name


def _preset_origin(base: Mapping[str, Any], choices: Mapping[str, str], options: Options) -> dict[str, str]:
    defaults = {key: to_plain(option.default) for key, option in options.table.items()}
    changed = [k for k, v in flatten(base).items() if k in defaults and defaults[k] != v]
    return {key: f"preset {choices.get(key.split('.')[0], ', '.join(choices.values()))}" for key in changed}


def _build(options: Options, values: Mapping[str, Any]) -> RunConfig:
    """Merge onto the pristine schema and make dataclass instances; reading a node resolves its interpolation."""
    try:
        tree = OmegaConf.structured(RunConfig)
        for kind, config in options.sections.items():
            tree[kind] = OmegaConf.structured(config)
    except OmegaConfBaseException as exc:
        raise PluginError(f"a plugin's config class is none for OmegaConf: {str(exc).splitlines()[0]}") from None
    values = options.conform(values)
    try:
        return _instance(OmegaConf.merge(tree, values), RunConfig, "")
    except MissingMandatoryValue as exc:
        raise ConfigError(f"{exc.full_key} must be set.") from None
    except OmegaConfBaseException as exc:
        raise ConfigError(_in_one_sentence(exc, options, values)) from None


def _instance(node: Any, owner: type[T], path: str) -> T:
    """Make ``owner`` out of a structured node, innermost first, so that a complaint can be given its full key."""
    values = {}
    for field in (f for f in fields(owner) if f.init):  # type: ignore[arg-type]
        value = node[field.name]
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            value = _instance(value, OmegaConf.get_type(value), f"{path}{field.name}.")  # type: ignore[arg-type]
        elif isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_object(value)
        values[field.name] = value
    try:
        return owner(**values)
    except ValueError as exc:
        text = str(exc)
        if path and not text.startswith(path):
            text = path + text if text.split(" ")[0].rstrip(":=") in values else f"{path[:-1]}: {text}"
        raise ConfigError(text) from None


def _in_one_sentence(exc: OmegaConfBaseException, options: Options, values: Mapping[str, Any]) -> str:
    text = str(exc).splitlines()[0]
    option = options.table.get(exc.full_key or "")
    if option is not None and "${" not in str(value := _at(values, option.key)):
        return wrong_value(option, value)
    values = flatten(values)
    suspects = [f"{k}={v}" for k, v in values.items() if "${" in str(v) and exc.full_key in (None, "", k)]
    return f"{', '.join(suspects) or exc.full_key} cannot be resolved: {text}."


def _at(values: Mapping[str, Any], key: str) -> Any:
    return reduce(lambda inner, name: inner[name], key.split("."), values)


def _check(plugins: Plugins, config: RunConfig, job: Job) -> None:
    used = [*((Kind.TRACKER, name) for name in config.trackers), (Kind.SHARDING, config.sync.manager)]
    used += [(Kind.TRANSPORT, config.sync.transport)] if config.sync.transport else []
    used += [(Kind(kind), section.name) for kind in SECTIONS if (section := getattr(config, kind)) is not None]
    for kind, name in used:
        plugins.get(kind, name)
    owners = {plugins.owner[key] for key in used}
    found = [*problems(config, job), *_incapable(plugins, config, job)]
    for texts in plugins.selected_hook("coupler_validate", owners)(config=config):
        found += texts or ()
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError("\n".join([f"the configuration has {len(found)} problems:", *(f"  - {p}" for p in found)]))


def _incapable(plugins: Plugins, config: RunConfig, job: Job) -> Iterator[str]:
    """Yield what is asked of a backend that does not declare it."""

    def declared(kind: Kind) -> frozenset[str]:
        section = getattr(config, kind)
        return plugins.get(kind, section.name).capabilities_of(section) if section is not None else frozenset()

    jobs = sorted(c.removeprefix("job:") for c in declared(Kind.ALGORITHM) if c.startswith("job:"))
    if jobs and job is not Job.EVAL and job not in jobs:
        yield f"algorithm={config.algorithm.name} is for coupler {' and '.join(jobs)}, not for coupler {job}."
    if job is not Job.TRAIN:
        return
    if config.sync.in_flight is not InFlight.DRAIN and f"in_flight:{config.sync.in_flight}" not in declared(
        Kind.ROLLOUT
    ):
        yield f"sync.in_flight={config.sync.in_flight}: rollout={config.rollout.name} cannot; every one can drain."


def _escaped(value: Any) -> Any:
    """Keep text that looks like an interpolation from being one when it is read again."""
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
