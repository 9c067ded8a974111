"""Describe a backend under test: its record, and the configuration that the kit and
``--coupler-set`` give it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from coupler.errors import ConfigError
from coupler.interfaces import Head, Model
from coupler.plugins.backend import Backend
from coupler.system.imports import resolve


@dataclass(frozen=True, slots=True)
class Subject:
    """One name of one kind, as tests get it."""

    backend: Backend
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ``--coupler-set``, and its own."""
    only: tuple[str, ...] = ()
    """Models of ``--coupler-model``; empty means all."""
    rows: str = ""
    """A file with rows of an environment's task; empty stands for the kit's rows."""
    selected: bool = False
    """Named by ``--coupler``: without its dependency it fails, it is not skipped."""
    own: str = ""
    """Settings and models as ``--coupler`` gave them."""

    def __str__(self) -> str:
        return f"{self.backend.kind}={self.backend.name}{self.own}"

    @property
    def toy(self) -> bool:
        return self.has("model:toy")

    @property
    def models(self) -> tuple[str, ...]:
        """The kit's models that this backend is tested with. The first is the usual
        one.
        """
        if self.toy:
            every = ("toy",)
        else:
            every = ("untied", "tied", *(["moe"] if self.has("model:moe") else []))
        return tuple(name for name in every if not self.only or name in self.only)

    def ranks_for(self, num_shards: int) -> int:
        """Return the fewest ranks of an engine with so many data shards, or with more
        where it takes them.
        """
        config = self.config()
        groups = -(-num_shards * config.ranks_per_shard // config.ranks_per_group)
        return groups * config.ranks_per_group

    def has(self, capability: str) -> bool:
        return capability in self.backend.capabilities_of(self.config())

    def config(self, **more: Any) -> Any:
        """Build the backend's configuration: its defaults, then what the kit needs,
        then what the user set.
        """
        return configured(self.backend.config, {**more, **self.settings})

    def create(
        self, folder: Path, head: Head = Head.LM, *, own_weights: bool = False, **more: Any
    ) -> Any:
        """Construct the engine or rollout on a model folder."""
        model = Model(str(folder), head=head, own_weights=own_weights)
        return self.backend.load()(self.config(**more), model)

    def recipe(self, folder: Path, head: Head = Head.LM, **more: Any) -> dict[str, Any]:
        """Return names and plain values from which another process builds it."""
        config = self.backend.config
        return {
            "target": self.backend.target,
            "config": f"{config.__module__}:{config.__qualname__}",
            "settings": {**more, **self.settings},
            "model": str(folder),
            "head": str(head),
        }


def build(recipe: Mapping[str, Any]) -> Any:
    """Construct what :meth:`Subject.recipe` describes."""
    config = configured(resolve(recipe["config"]), recipe["settings"])
    return resolve(recipe["target"])(config, Model(recipe["model"], head=Head(recipe["head"])))


def configured(config: type, settings: Mapping[str, Any]) -> Any:
    """Set plain values on the defaults of a config class, each turned into the type of
    its default.

    Raises:
        ConfigError: there is no such key, or a value is none for it.
    """
    default = config()
    names = {f.name for f in fields(config)}

    if unknown := sorted(settings.keys() - names):
        raise ConfigError(
            f"{config.__name__} has no key {unknown[0]!r}.\n  it has:  {', '.join(sorted(names))}"
        )
    try:
        return replace(
            default, **{key: type(getattr(default, key))(value) for key, value in settings.items()}
        )
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{config.__name__} does not take {dict(settings)}: {exc}") from None


def parse_settings(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Turn ``["engine.lr=1e-3"]`` into ``{"engine": {"lr": 0.001}}``.

    Raises:
        ConfigError: a text has not the form KIND.KEY=VALUE.
    """
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        kind, dot, key = path.partition(".")
        if not (equals and dot and key):
            raise ConfigError(
                f"--coupler-set {text!r} sets nothing.\n"
                "  write it as:  --coupler-set engine.lr=1e-3"
            )
        settings.setdefault(kind, {})[key] = _plain(value)
    return settings


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
