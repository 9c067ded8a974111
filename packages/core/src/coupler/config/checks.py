"""Check a composed configuration: ranges, and options that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from math import inf
from typing import Any

from coupler.config.options import SECTIONS, section
from coupler.config.schema import HF_MODEL, RESUMED, ExecutorName, Job, OnSync, RunConfig

# Options that count what only supervised training has.
OF_EPOCHS = ("epochs", "eval.every_epochs", "checkpoint.every_epochs", "eval.patience")


def problems(config: RunConfig, job: Job) -> Iterator[str]:
    """Yield a sentence with its key for each value that is out of range, contradicts
    another, or is empty although the job needs it.
    """
    yield from _out_of_range(config, "")
    for name in ("steps", "ranks"):
        least = min(getattr(config.profile, name), default=0)
        if least < 0:
            yield f"profile.{name} counts from 0, got {least}."

    if not config.model.path:
        yield (
            "model.path is empty: set it to a folder with config.json, *.safetensors and a "
            "tokenizer."
        )
    if not config.run_dir:
        yield "run_dir is empty: set it to a folder for logs and checkpoints."

    if config.environment:
        yield from _environment_problems(config)
    evaluates = does_evaluate(config, job)
    if not config.data.source and job is not Job.EVAL:
        yield "data.source is empty: set it to a .jsonl or .parquet file, or to pkg.mod:function."
    if not config.eval.data.source and evaluates:
        yield (
            "eval.data.source is empty: set it to the rows to evaluate on, a file or "
            "pkg.mod:function."
        )
    models = config.reward_model.model.path or config.judge.model.path
    if not (config.reward.named or config.environment or models) and does_sample(config, job):
        yield "reward.target is empty: set it to pkg.mod:function or file.py:function."

    if evaluates and config.eval.top_p < 1 and config.eval.temperature == 0:
        yield (
            f"eval.top_p={config.eval.top_p} needs eval.temperature above 0: greedy takes "
            "the most likely token."
        )
    if job is Job.EVAL and config.sampling.top_p < 1:
        yield f"sampling.top_p={config.sampling.top_p} is not of evaluation: set eval.top_p."
    if job is Job.EVAL and config.sampling.top_k:
        yield f"sampling.top_k={config.sampling.top_k} is not of evaluation: leave it out."

    if job is not Job.EVAL:
        yield from _checkpoint_problems(config)
    yield from _worker_problems(config, job)
    yield from _length_problems(config, job is Job.TRAIN, evaluates)
    yield from _adapter_problems(config)
    if job is Job.TRAIN:
        yield from _training_problems(config)
    elif job is Job.SFT:
        yield from _supervised_problems(config)


def _environment_problems(config: RunConfig) -> Iterator[str]:
    yield from _out_of_range(config.environment, "environment.")
    limit = config.environment.max_tokens

    for key, data in (("data", config.data), ("eval.data", config.eval.data)):
        if data.source and 0 < limit <= data.max_prompt_tokens:
            yield (
                f"environment.max_tokens={limit} leaves no token to answer the longest prompt: "
                f"set it above {key}.max_prompt_tokens={data.max_prompt_tokens}, or that lower."
            )
        if data.control_tokens:
            yield (
                f"{key}.control_tokens=true: environment={config.environment.name} renders every "
                "turn with the chat template, and text of messages stays text; leave it out."
            )


def _out_of_range(section: Any, start: str) -> Iterator[str]:
    """Yield the options that break the bounds of their fields.

    A plugin checks its own section.
    """
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value) and field.type != "Any":
            yield from _out_of_range(value, f"{start}{field.name}.")

        low, high = field.metadata.get("ge", -inf), field.metadata.get("le", inf)
        if field.metadata.keys() & {"ge", "le"} and not low <= value <= high:
            yield f"{start}{field.name} must be {_range(low, high)}, got {value}."


def does_evaluate(config: RunConfig, job: Job) -> bool:
    """Tell whether the job evaluates on ``eval.data``."""
    settings = config.eval
    return job is Job.EVAL or bool(
        settings.every_steps or settings.every_epochs or settings.at_start
    )


def does_sample(config: RunConfig, job: Job) -> bool:
    """Tell whether the job samples. Supervised training does in its evaluations, if a
    rollout is chosen.
    """
    return job is not Job.SFT or (config.rollout is not None and does_evaluate(config, job))


def evaluating(config: RunConfig) -> str:
    """Return the section of the rollout that samples evaluations."""
    return "eval.rollout" if config.eval.rollout else "rollout"


def _checkpoint_problems(config: RunConfig) -> Iterator[str]:
    settings = config.checkpoint
    if settings.keep_best and not settings.keep_last:
        yield "checkpoint.keep_best needs checkpoint.keep_last above 0: 0 keeps all."
    for key, parts in (("contents", (*RESUMED, HF_MODEL)), ("load_contents", RESUMED)):
        chosen = list(getattr(settings, key))
        if odd := [part for part in chosen if part not in parts]:
            yield f"checkpoint.{key} has {odd[0]!r}: it takes some of {', '.join(parts)}."
        elif "model" not in chosen:
            yield f"checkpoint.{key} needs model: no run goes on from a checkpoint without it."

    best, evaluates = settings.best_metric, config.eval.every_steps or config.eval.every_epochs
    for key in ("checkpoint.keep_best", "eval.patience"):
        if section(config, key) and best.startswith("eval/") and not evaluates:
            yield (
                f"{key} needs {best}: set eval.every_steps, or checkpoint.best_metric to another "
                "metric."
            )


def _worker_problems(config: RunConfig, job: Job) -> Iterator[str]:
    if config.executor is ExecutorName.TORCHRUN and job is not Job.SFT:
        yield f"executor=torchrun is of coupler sft: for coupler {job} set executor=ray."
    elif config.executor is ExecutorName.TORCHRUN and does_sample(config, job):
        yield (
            f"executor=torchrun starts engines alone, and rollout={config.rollout.name} is to "
            "sample evaluations: set executor=ray, or leave rollout out."
        )
    for path, kind in SECTIONS.items():
        inner, number = section(config, path), {"engine": "ranks", "rollout": "replicas"}.get(kind)
        if inner is None or number is None:
            continue

        key, count = f"{path}.{number}", getattr(inner, number)
        if count < 1:
            yield f"{key} must be at least 1, got {count}."
        elif count > 1 and config.executor is ExecutorName.LOCAL:
            yield f"{key}={count} needs more than one process: set executor=ray, or {key}=1."
        if inner.python and config.executor is not ExecutorName.RAY:
            yield f"{path}.python={inner.python} needs processes of its own: set executor=ray."


def longest_sequence(config: RunConfig, path: str) -> int:
    """Return the most tokens that a prompt and its completion, or an episode, can have
    in the rollout of the section ``path``.
    """
    lengths = _lengths(config, bool(config.data.source), bool(config.eval.data.source))
    return max((longest for of, _, longest in lengths if of == path), default=0)


def _lengths(config: RunConfig, trains: bool, evaluates: bool) -> list[tuple[str, str, int]]:
    """Return sections of rollouts, the keys that bound sequences, and the bounds."""
    sampled, evaluated = config.sampling.max_tokens, config.eval.max_tokens
    paths = ["rollout"] * trains + [evaluating(config)] * evaluates

    if config.environment:
        limit = config.environment.max_tokens
        keys = "environment.max_tokens" if limit else "what environment.max_tokens=0 stands for"
        return [(path, keys, episode_tokens(config)) for path in paths]

    lengths: list[tuple[str, str, int]] = []
    if trains:
        keys = "data.max_prompt_tokens + sampling.max_tokens"
        lengths.append(("rollout", keys, config.data.max_prompt_tokens + sampled))
    if evaluates:
        completion = "eval.max_tokens" if evaluated else "sampling.max_tokens"
        keys = f"eval.data.max_prompt_tokens + {completion}"
        longest = config.eval.data.max_prompt_tokens + (evaluated or sampled)
        lengths.append((evaluating(config), keys, longest))
    return lengths


def episode_tokens(config: RunConfig) -> int:
    """Return the most tokens of an episode of the environment."""
    settings = config.environment
    turn = max(config.sampling.max_tokens, config.eval.max_tokens)
    prompts = [data.max_prompt_tokens for data in (config.data, config.eval.data) if data.source]
    return settings.max_tokens or max(prompts, default=0) + settings.max_turns * turn


def _length_problems(config: RunConfig, trains: bool, evaluates: bool) -> Iterator[str]:
    """Yield the lengths that the rollout would cut short, or refuse when such a prompt
    comes.
    """
    for path, keys, longest in dict.fromkeys(_lengths(config, trains, evaluates)):
        rollout = section(config, path)
        option, limit = rollout.sequence_limit if rollout else ("", 0)
        if 0 < limit < longest:
            yield (
                f"{path}.{option}={limit} is less than one sequence can have: {keys} = {longest}; "
                f"set {path}.{option}={longest}, or one of those lower."
            )


def _adapter_problems(config: RunConfig) -> Iterator[str]:
    """Yield why the rollout cannot run the adapter that it was asked to: there is none,
    or it is larger than its place.
    """
    option, limit = config.rollout.adapter_limit if config.rollout else ("", 0)
    if not limit or not config.engine:
        return

    trained, rank = config.engine.adapter_rank
    if not rank:
        instead = f"set engine.{trained} above 0, or " if trained else "set "
        yield (
            f"rollout.{option}={limit} is for an adapter, and engine={config.engine.name} "
            f"trains none: {instead}rollout.{option}=0."
        )
    elif rank > limit:
        yield (
            f"engine.{trained}={rank} is more than rollout.{option}={limit} has room for: set "
            f"rollout.{option}={rank}, or 0: every sync then brings the weights with the "
            "adapter merged."
        )


def _training_problems(config: RunConfig) -> Iterator[str]:
    for key in OF_EPOCHS:
        if section(config, key):
            yield f"{key} is of coupler sft, whose steps take rows and sample none: leave it out."
    if 0 < config.sampling.top_p < 1 and not config.sampling.top_k:
        yield (
            f"sampling.top_p={config.sampling.top_p} needs sampling.top_k in training: the "
            "engine gets the ids that each token was sampled among, and so many at most; set "
            "sampling.top_k=100, say."
        )
    if config.sampling.top_k == 1:
        yield (
            "sampling.top_k must not be 1 in training: greedy samples of one prompt are all "
            "the same."
        )
    if config.sampling.temperature == 0:
        yield (
            "sampling.temperature must be above 0 in training: greedy samples of one prompt "
            "are all the same."
        )

    if config.deterministic and config.max_staleness > 0:
        yield (
            f"deterministic=true needs max_staleness=0, got {config.max_staleness}: which "
            "weights sample a token would depend on timing."
        )
    if config.max_staleness == 0 and config.sync.in_flight not in (OnSync.AUTO, OnSync.DRAIN):
        yield (
            f"sync.in_flight={config.sync.in_flight} needs max_staleness above 0: a "
            "synchronous run has nothing in flight during a sync."
        )


def _supervised_problems(config: RunConfig) -> Iterator[str]:
    if config.environment:
        yield (
            f"environment={config.environment.name} is of coupler train and coupler eval: leave "
            "it out."
        )
    settings = config.checkpoint
    best, compared = settings.best_metric, settings.keep_best or config.eval.patience
    if compared and best == "eval/reward" and not does_sample(config, Job.SFT):
        yield (
            "checkpoint.best_metric=eval/reward needs evaluations that sample: choose a rollout "
            "and a reward.target, or set it to eval/loss, and checkpoint.lower_is_better=true."
        )
    if config.eval.rollout:
        yield (
            f"eval.rollout={config.eval.rollout.name} is of coupler train: here rollout samples "
            "evaluations; leave it out."
        )
    is_loss = best.endswith(("loss", "nll", "perplexity"))
    if compared and is_loss and not settings.lower_is_better:
        yield f"checkpoint.best_metric={best} falls: set checkpoint.lower_is_better=true."

    if config.data.sampler:
        for key in (key for key in OF_EPOCHS if "epochs" in key and section(config, key)):
            yield f"{key} counts epochs, which data.sampler={config.data.sampler} has none of."
    for key, usual in (("max_staleness", 0), ("epochs_per_batch", 1)):
        if (value := getattr(config, key)) != usual:
            yield f"{key}={value} is of coupler train, for batches of samples: leave it out."


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if high in (inf, 2**63 - 1) else f"between {low:g} and {high:g}"
