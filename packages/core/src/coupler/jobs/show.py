"""Print the conversations of a recorded step, for ``coupler show``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.trajectory import Origin
from coupler.config.compose import Composed
from coupler.conversation.packing import ended_of, stretches
from coupler.data import Codec
from coupler.data.model_folder import model_folder
from coupler.errors import CouplerError
from coupler.interfaces import Model
from coupler.run import samples, step_record
from coupler.run.run_folder import find_run
from coupler.system.files import disk_errors_named
from coupler.system.terminal import WIDTH, fold, harmless


def show(
    composed: Composed,
    run_dir: Path,
    step: int | None = None,
    group: int | None = None,
) -> Iterator[str]:
    """Yield the lines of each conversation that a step trained on.

    They come from the record of the step, and where it has none, from its samples.

    Args:
        step: the number of the step. None is the last one that was kept.
        group: the number of one prompt group. None shows all of them.

    Raises:
        CouplerError: the step or the group was not kept, or its files are damaged.
    """
    recorded = step_record.steps(run_dir / "record")
    written = samples.steps(run_dir / samples.FOLDER)
    kept = sorted({*recorded, *written})
    if step is None:
        step = kept[-1] if kept else 0

    if step not in kept:
        raise CouplerError(
            f"{run_dir} kept nothing of step {step}.\n"
            f"  it has:  {', '.join(map(str, kept)) or 'none; set samples.every_steps=1'}"
        )
    yield from (
        _recorded(composed, run_dir, step, group)
        if step in recorded
        else _sampled(run_dir, step, group)
    )


def _recorded(composed: Composed, run_dir: Path, step: int, group: int | None) -> Iterator[str]:
    config = composed.config.model
    with disk_errors_named(run_dir):
        batch, _ = step_record.read(run_dir / "record", step, find_run(run_dir))
    _check(batch, run_dir, step, group)
    codec = Codec(Model(model_folder(config.path), config.trust_remote_code))

    for row in range(len(batch)):
        if group is None or batch["group"][row] == group:
            yield from _conversation(batch.take([row]), codec)


def _sampled(run_dir: Path, step: int, group: int | None) -> Iterator[str]:
    """Yield the lines of samples, of at most 80 columns."""
    lines = samples.read(run_dir / samples.FOLDER, step)
    _check_group(step, group, [line["group"] for line in lines])

    for line in lines:
        if group is None or line["group"] == group:
            yield from _sample(line)


def _sample(line: Mapping[str, Any]) -> Iterator[str]:
    yield f"--- group {line['group']}, trajectory {line['trajectory']}, ended: {line['finish']}"
    facts = {"reward": line["reward"], **(line.get("reward_parts") or {})}
    facts |= {"advantage": line.get("advantage")}
    known = ", ".join(f"{name} {value:g}" for name, value in facts.items() if value is not None)
    yield from textwrap.wrap(
        known,
        WIDTH,
        initial_indent="    ",
        subsequent_indent="    ",
    )

    for turn in line["turns"]:
        text = harmless(f"[{turn['origin']}] {turn['text']}", lines=True)
        for paragraph in text.expandtabs(4).split("\n"):
            yield from fold(paragraph)
    yield ""


def _check(batch: Batch, run_dir: Path, step: int, group: int | None) -> None:
    if missing := [name for name in ("origin", "ended", "group") if not batch.has(name)]:
        raise CouplerError(
            f"the record of step {step} in {run_dir} is damaged: it has no {', '.join(missing)}."
        )
    _check_group(step, group, batch["group"].tolist())


def _check_group(step: int, group: int | None, found: Sequence[int]) -> None:
    if group is not None and group not in found:
        groups = ", ".join(map(str, sorted({*found})))
        raise CouplerError(f"step {step} has no group {group}.\n  it has:  {groups}")


def _conversation(one: Batch, codec: Codec) -> Iterator[str]:
    yield (
        f"--- group {one['group'][0]}, trajectory {one['trajectory'][0]}, reward "
        f"{one['reward'][0]:g}, ended: {ended_of(one)}"
    )

    for origin, tokens in stretches(one):
        text = harmless(codec.tokenizer.decode(one["tokens"][tokens].tolist()), lines=True)
        yield f"[{origin}{_facts(one, tokens, origin)}] {text}"
    yield ""


def _facts(one: Batch, tokens: slice, origin: Origin) -> str:
    """Return what is known of sampled tokens: their number, versions and log-probs."""
    if origin is not Origin.SAMPLED:
        return ""
    versions = "-".join(map(str, np.unique(one["version"][tokens])))
    logprobs = one["rollout_logprobs"][tokens]

    rewards = one["token_reward"][tokens] if one.has("token_reward") else np.zeros(1)
    earned = f", reward {rewards.sum():g}" if rewards.any() else ""
    return (
        f" {len(logprobs)} tokens, version {versions}, log-prob {logprobs.mean():.2f} a token"
        f"{earned}"
    )
