"""Refuse models that are to be asked about episodes, and cannot be."""

from __future__ import annotations

from pathlib import Path

from coupler.config.checks import does_evaluate, does_sample
from coupler.config.compose import GIVES_VALUES
from coupler.config.schema import Job, RunConfig
from coupler.data.model_folder import model_folder
from coupler.errors import ConfigError
from coupler.plugins.manager import Plugins
from coupler.rewards.classifier import check_classifier
from coupler.rewards.judge import Question
from coupler.system.files import DamagedFile, read_json

OWN_WEIGHTS = "model:own_weights"  # capability of a rollout


def check_opinions(config: RunConfig, plugins: Plugins, job: Job) -> None:
    """Refuse a reward model or a judge that this run cannot ask.

    Raises:
        ConfigError: it cannot. The message names the option.
    """
    classifier, judge = config.reward_model.model.path, config.judge.model.path
    if not does_sample(config, job):
        if classifier or judge:
            key = "reward_model" if classifier else "judge"
            raise ConfigError(
                f"{key}.model.path scores what is sampled, and this run samples nothing: leave "
                "it out, or choose a rollout and set eval.every_steps."
            )
        return

    for path, key in (("reward_model.engine", classifier), ("judge.rollout", judge)):
        section = path.partition(".")[0]
        if not key and getattr(getattr(config, section), path.partition(".")[2]):
            raise ConfigError(
                f"{path} is chosen, and {section}.model.path is empty: set it to the folder of "
                f"the model, or leave {path} out."
            )
    if classifier and judge and not config.reward.named:
        raise ConfigError(
            "reward_model.model.path and judge.model.path are both set, and reward.target is "
            "empty: which of both is the reward?\n"
            "  try:  reward.target=file.py:function, which gets score and verdict, or one model "
            "alone"
        )
    if classifier:
        _check_reward_model(config, plugins)
    if judge:
        _check_judge(config, plugins, job)


def _check_reward_model(config: RunConfig, plugins: Plugins) -> None:
    engine = config.reward_model.engine
    check_classifier(Path(model_folder(config.reward_model.model.path, "reward_model.model")))

    if GIVES_VALUES not in plugins.get("engine", engine.name).capabilities_of(engine):
        able = [
            name
            for name, backend in plugins.declared("engine").items()
            if GIVES_VALUES in backend.capabilities
        ]
        raise ConfigError(
            f"reward_model.engine={engine.name} does not compute the score of a classifier "
            f"({GIVES_VALUES}).\n"
            f"  try:  engine@reward_model.engine set to one of {', '.join(sorted(able))}"
        )


def _check_judge(config: RunConfig, plugins: Plugins, job: Job) -> None:
    rollout, path = config.judge.rollout, config.judge.model.path
    Question.of(config.judge)
    if OWN_WEIGHTS not in plugins.get("rollout", rollout.name).capabilities_of(rollout):
        raise ConfigError(
            f"judge.rollout={rollout.name} cannot serve the weights of its own folder "
            f"({OWN_WEIGHTS}).\n"
            "  try:  another judge.rollout"
        )

    folder = Path(model_folder(path, "judge.model"))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"judge.model.path={path} is no folder with config.json.\n"
            "  try:  the folder of a chat model in Hugging Face layout"
        )
    least, keys = _least_tokens(config, job)
    option, limit = rollout.sequence_limit
    for name, tokens in (
        (f"judge.rollout.{option}={limit}", limit),
        (
            f"the judge of judge.model.path={path} has positions for {_positions(folder)} tokens, "
            "and that",
            _positions(folder),
        ),
    ):
        if 0 < tokens < least:
            raise ConfigError(
                f"{name} is less than a question and its verdict can have: {keys} = {least}.\n"
                "  try:  a smaller judge.max_tokens or sampling.max_tokens, or a judge of longer "
                "texts"
            )


def _least_tokens(config: RunConfig, job: Job) -> tuple[int, str]:
    """Return the tokens of the longest question, and the options that make them.

    They are counted as if policy and judge had one tokenizer, and the file no text.
    """
    data, completion = "data", config.sampling.max_tokens
    longest = config.data.max_prompt_tokens
    if job is not Job.TRAIN:
        data, longest = "eval.data", config.eval.data.max_prompt_tokens
    key = "sampling.max_tokens"
    if does_evaluate(config, job) and config.eval.max_tokens > completion:
        key, completion = "eval.max_tokens", config.eval.max_tokens
    total = longest + completion + config.judge.max_tokens
    return total, f"{data}.max_prompt_tokens + {key} + judge.max_tokens"


def _positions(folder: Path) -> int:
    """Return the longest sequence of a model, or 0 where no file says it."""
    try:
        found = read_json(folder / "config.json")
    except DamagedFile as error:
        raise ConfigError(f"judge.model.path={folder}: {error}") from None
    return int(found.get("text_config", found).get("max_position_embeddings") or 0)
