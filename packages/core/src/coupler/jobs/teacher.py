"""Find the models of teachers, and make the engines that compute their log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coupler.config.checks import longest_sequence
from coupler.data import Codec, Prompt
from coupler.data.model_folder import model_folder
from coupler.errors import ConfigError, DataError
from coupler.interfaces import Model
from coupler.jobs.build import Builder
from coupler.loop.engine_group import EngineGroup
from coupler.run.teacher_check import ALL_ROWS, role_of, teachers_of
from coupler.system.reads import original

COLUMN = "teacher"  # of rows, the name of theirs


def find_teachers(builder: Builder, prompts: Sequence[Prompt]) -> dict[str, Model]:
    """Return the teachers of the run by name, checked before a worker starts.

    Raises:
        CouplerError: a folder has no tokenizer, tokens of the policy have other ids
            there, it has too few positions, or a row names no teacher.
    """
    config = builder.config.teacher
    folders = teachers_of(config)
    if folders.keys() - {ALL_ROWS}:
        _check_names(prompts, folders)

    found: dict[str, Model] = {}
    for name, path in folders.items():
        key = f"teacher.models.{name}" if name else "teacher.model.path"
        model = Model(model_folder(path, key), config.model.trust_remote_code)
        _check(builder, key, model)
        found[name] = model
    return found


def make_teachers(builder: Builder, found: Mapping[str, Model]) -> dict[str, EngineGroup]:
    """Make the engine of each teacher that was found. Nothing is loaded."""
    engine = builder.config.teacher.engine
    return {name: builder.frozen(role_of(name), engine, model) for name, model in found.items()}


def _check(builder: Builder, key: str, model: Model) -> None:
    codec = Codec(model)
    check_tokens(builder.codec, codec, key)

    longest = longest_sequence(original(builder.config), "rollout")
    if codec.max_positions and codec.max_positions < longest:
        raise ConfigError(
            f"{key}={model.path} has positions for {codec.max_positions} tokens, and one "
            f"sequence can have {longest}.\n"
            "  try:  a smaller sampling.max_tokens or data.max_prompt_tokens"
        )


def check_tokens(policy: Codec, teacher: Codec, key: str) -> None:
    """Refuse a teacher that would read other tokens than the policy samples.

    Raises:
        ConfigError: a token of the policy has another id there, or none.
    """
    known = teacher.tokenizer.get_vocab()

    wrong = [
        (id, token) for token, id in policy.tokenizer.get_vocab().items() if known.get(token) != id
    ]
    if not wrong:
        return

    id, token = min(wrong)
    there = f"has the id {known[token]}" if token in known else "does not exist"
    raise ConfigError(
        f"{key}={teacher.folder} reads other tokens than the policy samples: {len(wrong)} differ, "
        f"and {token!r}, whose id is {id}, {there} there.\n"
        "  try:  a teacher of the policy's family, with the same tokenizer"
    )


def _check_names(prompts: Sequence[Prompt], folders: Mapping[str, str]) -> None:
    """Refuse rows whose column ``teacher`` names none of several teachers.

    Raises:
        DataError: there is one.
    """
    wrong = [p.row for p in prompts if p.row.extra.get(COLUMN) not in folders]
    if wrong:
        named = wrong[0].extra.get(COLUMN)
        raise DataError(
            f"{len(wrong)} of {len(prompts)} rows name no teacher of teacher.models; row "
            f"{wrong[0].index} (from 0) has {COLUMN}={named!r}.\n"
            f"  it takes:  {', '.join(sorted(folders))}"
        )
