"""Refuse a teacher that nothing learns from, or that is missing."""

from __future__ import annotations

from coupler.config.compose import MASKS
from coupler.config.schema import Job, RunConfig
from coupler.errors import ConfigError
from coupler.plugins.backend import Kind
from coupler.plugins.manager import Plugins

TEACHER_LOGPROBS = "teacher_logprobs"


def check_teacher(config: RunConfig, plugins: Plugins, needs: frozenset[str], job: Job) -> None:
    """Compare the section ``teacher`` with what the algorithm needs.

    Raises:
        ConfigError: they do not fit. The message names the option.
    """
    path, engine = config.teacher.model.path, config.teacher.engine
    if job is not Job.TRAIN:
        if path:
            raise ConfigError("teacher.model.path is of coupler train: leave it out.")
        return

    name = config.algorithm.name
    if TEACHER_LOGPROBS in needs and not path:
        raise ConfigError(
            f"algorithm={name} learns from a teacher, and teacher.model.path is empty.\n"
            "  try:  teacher.model.path=FOLDER of a larger model with the same tokenizer"
        )
    if path and TEACHER_LOGPROBS not in needs:
        raise ConfigError(
            f"teacher.model.path={path} is set, and algorithm={name} learns from no teacher.\n"
            "  try:  algorithm=opd, or leave it out"
        )
    if engine and not path:
        raise ConfigError(
            "teacher.engine is chosen, and teacher.model.path is empty: set it to the folder of "
            "the teacher, or leave teacher.engine out."
        )

    if not engine or not config.sampling.top_k:
        return

    masks = MASKS[Kind.ENGINE]
    if masks not in plugins.get("engine", engine.name).capabilities_of(engine):
        raise ConfigError(
            f"sampling.top_k={config.sampling.top_k} needs teacher.engine={engine.name} to "
            f"compute log-probs among some tokens, which it cannot ({masks}).\n"
            "  try:  sampling.top_k=0, or another teacher.engine"
        )
