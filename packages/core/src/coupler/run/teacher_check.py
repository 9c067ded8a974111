"""Refuse a teacher that nothing learns from, or that is missing."""

from __future__ import annotations

import re

from coupler.config.compose import MASKS
from coupler.config.options import section
from coupler.config.schema import Job, RunConfig, TeacherConfig
from coupler.errors import ConfigError
from coupler.executors.placement import TEACHER
from coupler.plugins.backend import Kind
from coupler.plugins.manager import Plugins

# Columns of an algorithm: log-probs of the sampled tokens, and of the teacher's most
# likely ones, for which engines declare TOPK.
TEACHER_LOGPROBS, TEACHER_TOP = "teacher_logprobs", "teacher_top_logprobs"
TOPK = "output:topk"
ALL_ROWS = ""  # name of the teacher that rows need not name
NAME = re.compile(r"[a-z0-9_]+")


def teachers_of(config: TeacherConfig) -> dict[str, str]:
    """Return the folders of teachers by name."""
    return dict(config.models) or ({ALL_ROWS: config.model.path} if config.model.path else {})


def role_of(name: str) -> str:
    """Return the role of the teacher of this name."""
    return f"{TEACHER}_{name}" if name else TEACHER


def check_teacher(config: RunConfig, plugins: Plugins, needs: frozenset[str], job: Job) -> None:
    """Compare the section ``teacher`` with what the algorithm needs.

    Raises:
        ConfigError: they do not fit. The message names the option.
    """
    teacher, needed = config.teacher, bool({TEACHER_LOGPROBS, TEACHER_TOP} & needs)
    given = {
        "teacher.model.path": teacher.model.path,
        "teacher.models": teacher.models,
        "teacher.prompt": teacher.prompt,
    }
    named = next((key for key, value in given.items() if value), "")
    if named and job is not Job.TRAIN:
        raise ConfigError(f"{named} is of coupler train: leave it out.")

    if needed and not named:
        raise ConfigError(
            f"algorithm={config.algorithm.name} learns from a teacher, and there is none.\n"
            "  try:  teacher.model.path=FOLDER of a larger model with the same tokenizer"
        )
    if named and not needed:
        raise ConfigError(
            f"{named}={given[named]} is set, and algorithm={config.algorithm.name} learns from no "
            f"teacher.\n  try:  algorithm=opd, or leave {named} out"
        )
    if teacher.model.path and teacher.models:
        raise ConfigError(
            "teacher.model.path and teacher.models are both set: which is the teacher?\n"
            "  try:  one of them; rows choose among teacher.models"
        )
    if wrong := next((name for name in teacher.models if not NAME.fullmatch(name)), ""):
        raise ConfigError(
            f"teacher.models.{wrong} is no name of a teacher.\n"
            "  try:  small letters, digits and underscores"
        )
    if teacher.engine:
        _check_engine(config, plugins)
    if TEACHER_TOP in needs:
        _check_topk(config, plugins)


def _check_topk(config: RunConfig, plugins: Plugins) -> None:
    """Refuse engines that do not compute log-probs of several tokens at a position."""
    for path in ("engine", "teacher.engine"):
        engine = section(config, path)
        if engine and TOPK not in plugins.get("engine", engine.name).capabilities_of(engine):
            raise ConfigError(
                f"algorithm={config.algorithm.name} as it is set learns a teacher's distribution, "
                f"and {path}={engine.name} does not compute log-probs of a position's most likely "
                f"tokens ({TOPK}).\n"
                f"  try:  another {path}, or the part teacher in place of gkd, which reads the "
                "sampled tokens alone"
            )


def _check_engine(config: RunConfig, plugins: Plugins) -> None:
    if not teachers_of(config.teacher):
        raise ConfigError(
            "teacher.engine is chosen, and teacher.model.path is empty: set it to the folder of "
            "the teacher, or leave teacher.engine out."
        )

    masks, engine = MASKS[Kind.ENGINE], config.teacher.engine
    able = plugins.get("engine", engine.name).capabilities_of(engine)
    if config.sampling.top_k and masks not in able:
        raise ConfigError(
            f"sampling.top_k={config.sampling.top_k} needs teacher.engine={engine.name} to "
            f"compute log-probs among some tokens, which it cannot ({masks}).\n"
            "  try:  sampling.top_k=0, or another teacher.engine"
        )
