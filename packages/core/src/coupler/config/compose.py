"""Compose one typed configuration: command line over the user's YAML over a plugin's
preset over dataclass defaults.

``engine``, ``rollout`` and ``algorithm`` are chosen by name (``engine=toy`` on the
command line, ``engine: toy`` or ``engine: {name: toy, lr: 1e-6}`` in YAML). A name is a
backend's, or a YAML preset's that a plugin ships. Where the command line chooses
another name than the file, the file's section is not used. ``engine@critic.engine=toy``
chooses the critic's engine, the policy's if left out. Where both are the same backend,
options that ``critic.engine`` does not set are those of ``engine``.

All of it is merged as plain data, and then once onto the pristine dataclasses, which
refuse an unknown key and a value of the wrong type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from coupler.config.checks import does_evaluate, evaluating, problems
from coupler.config.effect import not_default
from coupler.config.options import (
    SECTIONS,
    TRACKER,
    Options,
    drop_replaced,
    in_full,
    section,
    tracker_sections,
    wrong_value,
)
from coupler.config.overrides import parse_overrides, read_files
from coupler.config.presets import chosen_values, preset_text
from coupler.config.schema import JOBS, Job, OnSync, RunConfig
from coupler.errors import ConfigError, PluginError
from coupler.plugins.backend import Kind
from coupler.plugins.manager import Plugins
from coupler.system.plain import to_plain
from coupler.system.shapes import WrongShape, each_of
from coupler.system.tree import flatten, merge, nest, replace_at, value_at, wipe

T = TypeVar("T")
CRITIC = "critic.engine"
# sections that are as in the run if nothing else is chosen, and keys that call for them
AS_THE_RUN = {
    CRITIC: (),
    "teacher.engine": ("teacher.model.path", "teacher.models"),
    "reward_model.engine": ("reward_model.model.path",),
    "judge.rollout": ("judge.model.path",),
}
LIKE_THE_POLICY = (CRITIC, "teacher.engine", "reward_model.engine")
NEEDS_VALUES = "needs:values"  # capability of an algorithm
SCORES = "head:score"  # capability of an algorithm
GIVES_VALUES = "output:values"  # capability of an engine
TOP_P = "sampling:top_p"  # capability of a rollout
# capabilities that sampling.top_k takes
MASKS = {Kind.ROLLOUT: "output:sampling_mask", Kind.ENGINE: "input:sampling_mask"}
COMMAND_LINE = "command line"  # origin of values that were typed
AS_ENGINE = "as in engine"  # origin of values of the critic's engine from the policy's


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A checked configuration, and where its values come from."""

    # Engine, rollout and algorithm are instances of the plugins' dataclasses, or None.
    config: RunConfig
    # Full key -> COMMAND_LINE, a file's path, "preset <name>" or AS_ENGINE. Defaults
    # are left out.
    origin: Mapping[str, str]
    notes: tuple[str, ...] = ()  # to be shown before the run starts
    options: Options

    @property
    def set_keys(self) -> list[str]:
        """Keys that the user set, on the command line or in the file.

        A file that repeats a default sets nothing: one that a run wrote names every
        key.
        """
        repeated = self.options.table.keys() - not_default(self.config)
        return [
            key
            for key, origin in self.origin.items()
            if origin == COMMAND_LINE
            or (origin != AS_ENGINE and not origin.startswith("preset ") and key not in repeated)
        ]


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
        complete: False to look at a configuration that cannot run yet: sections may be
            missing and values out of range.

    Raises:
        ConfigError: a key is unknown, of the wrong type or out of range, or a required
            one is empty.
        PluginError: what a section names is not installed, is broken, or is ambiguous.
    """
    typed = nest(pairs := parse_overrides(overrides))
    files = read_files(config_file, typed.pop("preset", None), partial(preset_text, plugins))
    written = files.values
    if config_file and Path(config_file).with_name("run.json").is_file():
        drop_replaced(written)
    wipe([written], pairs, SECTIONS, None)  # environment=null
    notes: list[str] = []
    choices: dict[str, str] = {}

    for path in SECTIONS:
        name = _choose(path, typed, written, config_file or "the preset", notes)
        if not name and path in AS_THE_RUN:
            keys = (path, *AS_THE_RUN[path])
            wanted = any(value_at(layer, key) for layer in (typed, written) for key in keys)
            if path == CRITIC and not wanted:
                wanted = _needs_values(plugins, _base(plugins, choices))
            name = choices.get(SECTIONS[path], "") if wanted else ""
        if name:
            choices[path] = name
        elif (complete and path in JOBS[job]) or value_at(typed, path) or value_at(written, path):
            kind = SECTIONS[path]
            installed = {*plugins.declared(kind), *plugins.presets(kind)}
            names = ", ".join(sorted(installed)) or "none"
            raise ConfigError(f"{path} is not chosen.\n  try:  {path}=NAME\n  installed:  {names}")

    base = _base(plugins, choices)
    inherited = _inherited(choices, written, typed)
    chosen = {
        path: plugins.get(SECTIONS[path], _backend_name(base, path, name)).config
        for path, name in choices.items()
    }
    options = Options(chosen | tracker_sections(_trackers(plugins, typed, written, complete)))
    with files.named():
        options.conform(written)  # What the command line replaces is checked too.
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in typed and other not in typed:  # Both say how long a run is.
            written.pop(other, None)
    wipe([base], flatten(written).items(), options.table, {})  # data.args={}
    wipe([base, inherited, written], pairs, options.table, {})
    config = _build(options, merge(merge(merge(base, inherited), written), typed))
    if complete:
        _check(plugins, config, job)

    for path in choices:
        extra = options.table.get(f"{path}.extra_args")
        if given := section(config, path).extra_args if extra else {}:
            notes.append(f"{path}.extra_args is passed through unchecked: {', '.join(given)}")
    origin = _preset_origin(base, choices, options) | dict.fromkeys(flatten(inherited), AS_ENGINE)
    origin |= {key: files.origin.get(key, config_file or "") for key in flatten(written)}
    origin |= dict.fromkeys(flatten(typed), COMMAND_LINE)
    return Composed(config=config, origin=origin, notes=tuple(notes), options=options)


def plain(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain data: no dataclasses, no enums."""
    return to_plain(config)


def dump_yaml(config: RunConfig) -> str:
    """Write the configuration as YAML that composes to the same one again, with
    ``--config``.
    """
    values = {key: value for key, value in plain(config).items() if value is not None}
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(values)))


def _choose(
    path: str, typed: dict[str, Any], written: dict[str, Any], file: str, notes: list[str]
) -> str:
    """Take the choice of a section out of both layers. A section of the file that is
    for another choice goes with it.
    """
    typed_name, written_name = _take_name(path, typed), _take_name(path, written)

    if typed_name and written_name and typed_name != written_name and value_at(written, path):
        replace_at(written, path, None)
        notes.append(
            f"{file}: section {path} is for {written_name} and not used, {path}={typed_name} "
            "was chosen"
        )
    return typed_name or written_name


def _take_name(path: str, layer: dict[str, Any]) -> str:
    inner = value_at(layer, path)
    kept = dict(inner) if isinstance(inner, Mapping) else {"name": inner}
    name = kept.pop("name", None)
    replace_at(layer, path, kept)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{path} takes the name of a plugin's backend or preset, got {name!r}.")
    return name or ""


def _needs_values(plugins: Plugins, base: Mapping[str, Any]) -> bool:
    """Tell whether the chosen algorithm trains a critic, whose engine then is a section
    of the run.
    """
    name = value_at(base, "algorithm.name")
    if name is None:
        return False
    backend = plugins.get("algorithm", name)
    return NEEDS_VALUES in backend.capabilities_of(backend.config())


def _trackers(
    plugins: Plugins, typed: Mapping[str, Any], written: Mapping[str, Any], complete: bool
) -> dict[str, type]:
    """Return the configuration class of each tracker that is chosen, or has options."""
    chosen = typed.get("trackers", written.get("trackers", RunConfig().trackers))
    named = [name for name in chosen if isinstance(name, str)] if isinstance(chosen, list) else []
    given = [layer.get(TRACKER) for layer in (written, typed)]
    names = [name for name in named if complete or plugins.owner_of(Kind.TRACKER, name)]
    names += [str(name) for each in given if isinstance(each, Mapping) for name in each]
    return {name: plugins.get(Kind.TRACKER, name).config for name in names}


def _inherited(
    choices: Mapping[str, str], written: Mapping[str, Any], typed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the user's options of ``engine`` for a critic, a teacher or a reward model
    whose engine is the same choice.
    """
    said = merge(written.get("engine", {}), typed.get("engine", {}))
    same = [path for path in LIKE_THE_POLICY if choices.get(path)]
    return nest([(p, said) for p in same if said and choices[p] == choices.get("engine")])


def _base(plugins: Plugins, choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the defaults of the chosen backends, and of the chosen presets on top."""
    return nest([(path, _chosen(plugins, path, name)) for path, name in choices.items()])


def _chosen(plugins: Plugins, path: str, name: str) -> dict[str, Any]:
    kind = SECTIONS[path]
    try:
        return chosen_values(plugins, kind, name)
    except PluginError as error:
        if path == kind:
            raise
        raise PluginError(f"{path}={name}: {error}") from error


def _backend_name(base: Mapping[str, Any], path: str, choice: str) -> str:
    name = value_at(base, f"{path}.name")
    if not name:
        raise PluginError(
            f"the preset {path}={choice} does not say which backend it is for; it needs a 'name'."
        )
    return name


def _preset_origin(
    base: Mapping[str, Any], choices: Mapping[str, str], options: Options
) -> dict[str, str]:
    defaults = {key: to_plain(option.default) for key, option in options.table.items()}
    changed = [k for k, v in flatten(base).items() if k in defaults and defaults[k] != v]

    by_section = {
        key: [name for path, name in choices.items() if key.startswith(f"{path}.")]
        for key in changed
    }
    return {
        key: f"preset {', '.join(names or choices.values())}" for key, names in by_section.items()
    }


def _build(options: Options, values: Mapping[str, Any]) -> RunConfig:
    """Merge onto the pristine schema and make dataclass instances.

    Reading a node resolves its interpolation.
    """
    try:
        tree = OmegaConf.structured(RunConfig)
        for path, config in options.sections.items():
            OmegaConf.update(tree, path, OmegaConf.structured(config), merge=False)
    except OmegaConfBaseException as exc:
        raise PluginError(
            f"a plugin's config class is none for OmegaConf: {str(exc).splitlines()[0]}"
        ) from None

    values = options.conform(values)
    try:
        return _instance(OmegaConf.merge(tree, values), RunConfig, "")
    except MissingMandatoryValue as exc:
        raise ConfigError(f"{exc.full_key} must be set.") from None
    except OmegaConfBaseException as exc:
        raise ConfigError(_in_one_sentence(exc, options, values)) from None


def _instance(node: Any, owner: type[T], path: str) -> T:
    """Make ``owner`` out of a structured node, innermost first, so that a complaint can
    be given its full key.
    """
    values = {}
    for field in (f for f in fields(owner) if f.init):  # type: ignore[arg-type]
        value = node[field.name]
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            value = _instance(value, OmegaConf.get_type(value), f"{path}{field.name}.")  # type: ignore[arg-type]
        elif isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_object(value)
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{path}{field.name} must be a finite number, got {value}.")
        values[field.name] = value

    try:
        return owner(**values)
    except ValueError as exc:
        text = in_full(str(exc), path[:-1])
        if path and not text.startswith(path):
            begins_with_key = text.split(" ")[0].rstrip(":=") in values
            text = path + text if begins_with_key else f"{path[:-1]}: {text}"
        raise ConfigError(text) from None


def _in_one_sentence(
    exc: OmegaConfBaseException, options: Options, values: Mapping[str, Any]
) -> str:
    text = str(exc).splitlines()[0]
    option = options.table.get(exc.full_key or "")
    if option is not None and "${" not in str(value := value_at(values, option.key)):
        return wrong_value(option, value)

    values = flatten(values)
    suspects = [
        f"{k}={v}" for k, v in values.items() if "${" in str(v) and exc.full_key in (None, "", k)
    ]
    named = ", ".join(suspects)[:300] or exc.full_key
    return (
        f"{named} cannot be resolved: {text[:300].rstrip('.')}.\n"
        "  try:  a value, or ${KEY} of an option that has one"
    )


def _check(plugins: Plugins, config: RunConfig, job: Job) -> None:
    used = [
        *((Kind.TRACKER, name) for name in config.trackers),
        (Kind.SHARDING, config.sync.manager),
    ]
    used += [(Kind.TRANSPORT, config.sync.transport)] if config.sync.transport else []
    chosen = {path: section(config, path) for path in SECTIONS}
    used += [
        (Kind(SECTIONS[path]), inner.name) for path, inner in chosen.items() if inner is not None
    ]
    for kind, name in used:
        plugins.get(kind, name)

    owners = {owner for key in used if (owner := plugins.owner_of(*key))}
    found = [*problems(config, job), *_incapable(plugins, config, job)]
    for source, answer in plugins.answers("coupler_validate", owners, config=config):
        texts = [answer] if isinstance(answer, str) else answer
        try:
            found += each_of("coupler_validate", texts, str)
        except WrongShape as error:
            raise PluginError(f"{error}.\n  of:  {source}\n  try:  {source.fix}") from None

    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        lines = [f"the configuration has {len(found)} problems:", *(f"  - {p}" for p in found)]
        raise ConfigError("\n".join(lines))


def _incapable(plugins: Plugins, config: RunConfig, job: Job) -> Iterator[str]:
    """Yield a sentence for each thing asked of a backend that does not declare it."""

    def declared(path: str) -> frozenset[str]:
        inner = section(config, path)
        return (
            plugins.get(SECTIONS[path], inner.name).capabilities_of(inner)
            if inner is not None
            else frozenset()
        )

    jobs = sorted(c.removeprefix("job:") for c in declared(Kind.ALGORITHM) if c.startswith("job:"))
    if jobs and job is not Job.EVAL and job not in jobs:
        yield (
            f"algorithm={config.algorithm.name} is for coupler {' and '.join(jobs)}, not "
            f"for coupler {job}.\n  try:  another algorithm, or another command"
        )
    path = evaluating(config)
    if config.eval.top_p < 1 and does_evaluate(config, job) and TOP_P not in declared(path):
        name = section(config, path).name
        yield f"eval.top_p={config.eval.top_p}: {path}={name} cannot; leave it out."

    if SCORES in declared(Kind.ALGORITHM) and GIVES_VALUES not in declared(Kind.ENGINE):
        yield (
            f"algorithm={config.algorithm.name} trains a score, and engine={config.engine.name} "
            f"does not compute values ({GIVES_VALUES}): set engine to another."
        )
    if job is not Job.TRAIN:
        return
    for kind, wanted in MASKS.items() if config.sampling.top_k > 0 else ():
        if wanted not in declared(kind):
            yield (
                f"sampling.top_k={config.sampling.top_k}: {kind}={section(config, kind).name} "
                f"cannot ({wanted}); set sampling.top_k=0 and sampling.top_p=1, or another {kind}."
            )
    if NEEDS_VALUES in declared(Kind.ALGORITHM) and GIVES_VALUES not in declared(CRITIC):
        able = [
            name
            for name, engine in plugins.declared(Kind.ENGINE).items()
            if GIVES_VALUES in engine.capabilities
        ]
        yield (
            f"algorithm={config.algorithm.name} trains a critic, and "
            f"critic.engine={config.critic.engine.name} does not compute values "
            f"({GIVES_VALUES}): set engine@critic.engine to one of {', '.join(sorted(able))}."
        )

    how, able = config.sync.in_flight, declared(Kind.ROLLOUT)
    if how not in (OnSync.AUTO, OnSync.DRAIN) and f"in_flight:{how}" not in able:
        yield (
            f"sync.in_flight={config.sync.in_flight}: rollout={config.rollout.name} cannot; "
            "every one can drain."
        )


def _escaped(value: Any) -> Any:
    """Keep text that looks like an interpolation from being one when it is read
    again.
    """
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
