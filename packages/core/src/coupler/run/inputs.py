"""Check what a configuration names before anything is imported, started or made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coupler.config.checks import does_evaluate, does_sample
from coupler.config.options import SECTIONS, section
from coupler.config.schema import DataConfig, ExecutorName, Job, RunConfig
from coupler.data.columns import Columns
from coupler.data.dataset import check_first_row
from coupler.data.files import is_function
from coupler.data.folder_check import check_model_folder
from coupler.data.hub import fetch, is_name
from coupler.errors import ConfigError
from coupler.executors.torchrun.launch import check_world, launch_of
from coupler.rewards.options import RewardFunction, opinions_of
from coupler.rewards.signatures import KEYWORDS, Parameters
from coupler.run.checkpoint_hook import load_hook
from coupler.run.resume import AUTO, DISABLE, is_started
from coupler.run.row_form import ColumnsOf
from coupler.run.teacher_check import teachers_of
from coupler.system.targets import target_problem

# The longest path, and the longest name in it, that Linux takes.
MAX_PATH, MAX_NAME = 4096, 255


def check_inputs(
    config: RunConfig, job: Job, columns: Mapping[str, ColumnsOf] | None = None
) -> None:
    """Refuse a path or a target that cannot be what its option takes.

    Nothing is imported and no code of the user runs. A file of rows is read up to its
    first row, and a model folder by its JSON files and the headers of its weights.

    Args:
        columns: what names the columns of each section of data.

    Raises:
        CouplerError: the first one that cannot. The sentence names the key.
    """
    for check in _checks(config, job, columns or {}):
        check()


def _checks(
    config: RunConfig, job: Job, columns: Mapping[str, ColumnsOf]
) -> Iterator[Callable[[], object]]:
    yield partial(_check_folder_to_write, config.run_dir, "run_dir")
    if config.profile.steps and config.profile.path:
        yield partial(_check_folder_to_write, config.profile.path, "profile.path")
    yield partial(_check_executor, config)
    yield partial(_check_trackers, config)
    yield partial(_check_targets, config)

    yield partial(_check_model, config.model.path, "model.path")
    if config.critic.engine and config.critic.model.path:
        yield partial(_check_model, config.critic.model.path, "critic.model.path")
    if job is Job.TRAIN:
        for name, path in teachers_of(config.teacher).items():
            key = f"teacher.models.{name}" if name else "teacher.model.path"
            yield partial(_check_model, path, key)
    if does_sample(config, job):
        for key, scorer in (("reward_model", config.reward_model), ("judge", config.judge)):
            if scorer.model.path:
                yield partial(_check_model, scorer.model.path, f"{key}.model.path")
    if job is not Job.EVAL:
        yield partial(_check_rows, config.data, "data", columns.get("data", Columns))
        yield partial(check_sampler, config)
        yield partial(_check_resume, config)
        yield partial(load_hook, config.checkpoint.hook)
    if does_evaluate(config, job):
        yield partial(_check_rows, config.eval.data, "eval.data", columns.get("eval.data", Columns))
        yield partial(check_no_sampler, config.eval.data)
    if does_sample(config, job):
        said = opinions_of(config.reward_model, config.judge)
        for key, function in config.reward.named.items():
            yield partial(_check_reward, f"{key}.target", function, said)
    yield _check_installed


def _check_folder_to_write(path: str, key: str) -> None:
    """Refuse a folder that cannot be made or written. Nothing is made here."""
    parts = Path(path).parts
    if len(os.fsencode(path)) >= MAX_PATH or any(len(os.fsencode(p)) > MAX_NAME for p in parts):
        raise ConfigError(
            f"{key}={path[:80]}... cannot be written: the name is too long.\n  try:  another {key}"
        )

    if path.startswith("~") and not os.path.lexists(parts[0]):
        raise ConfigError(
            f"{key}={path} begins with ~, which nothing has replaced by a folder.\n"
            f"  try:  {key}={os.path.expanduser(path)}, or {key}=./{path}"
        )

    nearest = Path(path).absolute()
    try:
        while not os.path.lexists(nearest) and nearest.parent != nearest:
            nearest = nearest.parent
        why = "" if nearest.is_dir() else "Not a directory"
        if not why and not os.access(nearest, os.W_OK | os.X_OK):
            why = "Permission denied"
    except OSError as error:
        why = error.strerror or str(error)
    if why or str(nearest).startswith(("/proc/", "/sys/")):
        raise ConfigError(
            f"{key}={path} cannot be written: {why or 'the kernel makes what is there'}.\n"
            f"  try:  another {key}"
        )


def _check_executor(config: RunConfig) -> None:
    if config.executor is ExecutorName.TORCHRUN:
        check_world(launch_of(os.environ), config.engine.ranks)
    elif launch_of(os.environ):
        raise ConfigError(
            "torchrun started this process, and starts processes for coupler sft alone.\n"
            "  try:  the command without torchrun, and executor=ray for several ranks"
        )
    if config.executor is not ExecutorName.RAY:
        return
    if find_spec("ray") is None:
        raise ConfigError("ray is not installed.\n  try:  pip install 'coupler-core[ray]'")

    for path in SECTIONS:
        inner = section(config, path)
        python = getattr(inner, "python", "")
        if python and not (os.path.isfile(python) and os.access(python, os.X_OK)):
            raise ConfigError(
                f"{path}.python={python} is no program.\n  try:  the python of a virtual "
                f"environment, such as .venv/bin/python, or {path}.python=''"
            )


def _check_trackers(config: RunConfig) -> None:
    """Refuse another name of a tracker, which selects none."""
    for name in config.trackers:
        said = getattr(getattr(config.tracker, name, None), "name", name)
        if said != name:
            raise ConfigError(
                f"tracker.{name}.name={said} is no option of the tracker.\n"
                "  try:  leaving it out; trackers says which trackers a run has"
            )


def _check_targets(config: RunConfig) -> None:
    """Refuse what an option of a backend names to be imported, and what is not there.

    Such an option has the metadata ``target``. Another interpreter looks for its own.
    """
    for path in SECTIONS:
        inner = section(config, path)
        if inner is None or getattr(inner, "python", ""):
            continue

        for option in fields(inner):
            given = getattr(inner, option.name) if option.metadata.get("target") else []
            for target in filter(None, [given] if isinstance(given, str) else given):
                if problem := target_problem(target, places=(os.getcwd(),)):
                    raise ConfigError(f"{path}.{option.name}={target} {problem}")


def _check_model(path: str, key: str) -> None:
    if ":" in path and not os.path.exists(path):
        if problem := target_problem(path):
            why = problem.partition(": ")[2]
            more = "" if "\n" in why else "\n  try:  a downloaded model, or pkg.mod:function"
            raise ConfigError(f"{key}={path} is no folder, and no function either: {why}{more}")
        return

    if is_name(path):
        path = str(fetch(path, key))
    if key != "model.path" and not os.path.isdir(path):
        instead = "leaving it out: model.path then serves"
        if not key.startswith("critic."):
            instead = "the folder of a downloaded model"
        raise ConfigError(f"{key}={path[:200]} is no folder.\n  try:  {instead}")
    check_model_folder(path, key)


def _check_rows(data: DataConfig, key: str, columns: ColumnsOf = Columns) -> None:
    if isinstance(data.source, str) and is_function(data.source):
        if problem := target_problem(data.source):
            why = problem.partition(": ")[2]
            more = "" if "\n" in why else "\n  try:  FILE.jsonl, or pkg.mod:function"
            raise ConfigError(f"{key}.source={data.source} cannot be imported: {why}{more}")
        return
    check_first_row(data, key, columns)


def check_sampler(config: RunConfig) -> None:
    """Refuse a class of ``data.sampler`` that there is not. It is not imported.

    Raises:
        ConfigError: there is no such class.
    """
    target = config.data.sampler
    if target and (problem := target_problem(target)):
        raise ConfigError(f"data.sampler={target} {problem}")


def check_no_sampler(data: DataConfig) -> None:
    """Refuse a class that picks rows for an evaluation.

    Raises:
        ConfigError: there is one.
    """
    if data.sampler:
        raise ConfigError(
            f"eval.data.sampler={data.sampler}: an evaluation takes every row once.\n"
            "  try:  eval.data.sampler=''"
        )


def _check_reward(key: str, function: RewardFunction, opinions: tuple[str, ...]) -> None:
    keywords = ", ".join((*KEYWORDS, *opinions))

    def misfit(*found: Any) -> str:
        return Parameters(*found).without(function.args).misfit(opinions)

    if problem := target_problem(function.target, misfit, (os.getcwd(),)):
        more = f"\n  it is called with the keywords it takes among:  {keywords}"
        more = "" if "\n" in problem else more
        raise ConfigError(f"{key}={function.target} {problem}{more}")


def _check_installed() -> None:
    """Refuse an environment in which torch cannot be imported, since it reads every
    entry point.
    """
    for distribution in distributions():
        try:
            _ = distribution.entry_points
        except Exception as error:
            folder = getattr(distribution, "_path", "a distribution")
            raise ConfigError(
                f"{folder} has an entry_points.txt that cannot be read, and torch reads it "
                f"when it is imported: {error}.\n  try:  pip uninstall of that distribution"
            ) from None


def _check_resume(config: RunConfig) -> None:
    """Refuse a folder without checkpoints, unless the run has some of its own."""
    wanted = config.checkpoint.resume
    if wanted in (AUTO, DISABLE) or is_started(Path(config.run_dir)):
        return

    names = ("checkpoints", "MANIFEST.json")
    if not any(os.path.exists(os.path.join(wanted, name)) for name in names):
        raise ConfigError(
            f"checkpoint.resume={wanted[:200]} is no whole checkpoint: it holds neither "
            f"{' nor '.join(names)}.\n  try:  checkpoint.resume=auto, disable, or the "
            "folder of one, or of a run that has one"
        )
