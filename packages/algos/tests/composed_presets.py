"""Presets as a run composes them, built into algorithms."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import coupler_algos.conf
from coupler.config.compose import compose
from coupler.config.schema import Job
from coupler.interfaces import Algorithm
from coupler.plugins.manager import Plugins
from coupler_algos.grpo import GRPO
from coupler_algos.ppo import PPO
from coupler_algos.rloo import RLOO

NAMES = sorted(
    file.stem
    for file in Path(coupler_algos.conf.__path__[0], "algorithm").glob("*.yaml")
    if "[dpo," not in file.read_text()
)
CLASSES = {"grpo": GRPO, "rloo": RLOO, "ppo": PPO}
REQUIRED = ("engine=toy", "rollout=toy", "model.path=m", "data.source=d", "reward.target=a:b")
# Completions of 20 tokens at most.
SHORT = ("sampling.max_tokens=20",)
OF_PRESET = {"dapo": ("algorithm.overlong_buffer_tokens=5",), "gigpo": ("environment=toy",)}


@cache
def algorithm(name: str, *overrides: str) -> Algorithm:
    """Build ``algorithm=NAME`` with these overrides."""
    given = [*REQUIRED, *SHORT, f"algorithm={name}", *OF_PRESET.get(name, ()), *overrides]
    config = compose(Plugins.load(), given, job=Job.TRAIN).config.algorithm
    return CLASSES[config.name](config)
