"""Find the model of a teacher, and make the engine that computes its log-probs."""

from __future__ import annotations

from coupler.config.checks import longest_sequence
from coupler.data import Codec
from coupler.data.model_folder import model_folder
from coupler.errors import ConfigError
from coupler.executors.placement import TEACHER
from coupler.interfaces import Model
from coupler.jobs.build import Builder
from coupler.loop.engine_group import EngineGroup
from coupler.system.reads import original

KEY = "teacher.model.path"


def find_teacher(builder: Builder) -> Model | None:
    """Return the teacher of the run, checked before a worker starts, if it has one.

    Raises:
        CouplerError: its folder has no tokenizer, tokens of the policy have other ids
            there, or it has too few positions.
    """
    config = builder.config.teacher.model
    if not config.path:
        return None

    model = Model(model_folder(config.path, "teacher.model"), config.trust_remote_code)
    codec = Codec(model)

    check_tokens(builder.codec, codec)
    longest = longest_sequence(original(builder.config), "rollout")
    if codec.max_positions and codec.max_positions < longest:
        raise ConfigError(
            f"{KEY}={config.path} has positions for {codec.max_positions} tokens, and one "
            f"sequence can have {longest}.\n"
            "  try:  a smaller sampling.max_tokens or data.max_prompt_tokens"
        )
    return model


def make_teacher(builder: Builder, model: Model | None) -> EngineGroup | None:
    """Make the engine of the teacher that was found. Nothing is loaded."""
    return builder.frozen(TEACHER, builder.config.teacher.engine, model) if model else None


def check_tokens(policy: Codec, teacher: Codec) -> None:
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
        f"{KEY}={teacher.folder} reads other tokens than the policy samples: {len(wrong)} differ, "
        f"and {token!r}, whose id is {id}, {there} there.\n"
        "  try:  a teacher of the policy's family, with the same tokenizer"
    )
