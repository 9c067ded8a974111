"""Ask teachers for the log-probs of the tokens that the policy sampled, and of those
that they find most likely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import DEMONSTRATION, OF_ENGINES, ROUTED_EXPERTS, TOP_IDS
from coupler.config.checks import episode_tokens
from coupler.data import Prompt, encode_prompts
from coupler.data.dataset import Row
from coupler.data.options import Truncation
from coupler.data.templates import messages_of
from coupler.engine_kit.sampling_mask import CUT
from coupler.errors import ConfigError, CouplerError, DataError
from coupler.interfaces import Output
from coupler.jobs.build import Builder
from coupler.jobs.teacher import COLUMN
from coupler.loop.device_memory import Held, Residency
from coupler.loop.engine_group import EngineGroup
from coupler.run.plan_checks import micro_batch_room
from coupler.run.teacher_check import ALL_ROWS, TEACHER_LOGPROBS, TEACHER_TOP
from coupler.system.files import DamagedFile, read_text
from coupler.system.reads import original
from coupler.system.words import IN_BRACES

LOGPROBS = Output("logprobs")
KEY = "teacher.prompt"
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Teaching:
    """Provides ``teacher_logprobs`` or, where ``top_k`` is above 0, these,
    ``teacher_top_logprobs`` [T, k] and the ids that these are of.

    An id from ``vocabulary`` on, which the policy does not have, is none: its
    probability is of the tail.

    Attributes:
        engines: those of teachers by name, where "" is the teacher of all rows.
        names: the teacher of each row of the data, by the row's number.
        prompts: the ids of a prompt, and those that a teacher reads in its place, by
            the number of the row. It is empty where teachers read what the policy read.
    """

    engines: Mapping[str, EngineGroup]
    names: Mapping[int, str]
    prompts: Mapping[int, tuple[Ids, Ids]]
    residency: Residency
    top_k: int = 0
    vocabulary: int = 0

    async def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        want, found = self._wanted(), self._blank_columns(batch.num_tokens)
        numbers = batch["row"].tolist()
        names = np.array([self.names[number] if self.names else ALL_ROWS for number in numbers])

        for name, group in self.engines.items():
            rows = np.flatnonzero(names == name)
            if not len(rows):
                continue

            asked = batch.take(rows).without(ROUTED_EXPERTS)
            if self.prompts:
                asked = behind(asked, [self.prompts[numbers[row]] for row in rows])
            role = group.spec.role
            async with self.residency(role, {role: frozenset({Held.PARAMS})}):
                answer = await group.forward(asked, want)

            mine = batch.spread(names == name) & batch["loss_mask"]
            for output, column in zip(want, found.values(), strict=True):
                column[mine] = answer[output.name][asked["loss_mask"]]

        if self.top_k:
            beyond = found[TOP_IDS] >= self.vocabulary
            found[TOP_IDS][beyond], found[TEACHER_TOP][beyond] = -1, CUT
        return found

    def _wanted(self) -> tuple[Output, ...]:
        """Return the outputs of a teacher, in the order of the columns."""
        if not self.top_k:
            return (LOGPROBS,)
        return LOGPROBS, Output(TOP_IDS, self.top_k), Output("top_logprobs")

    def _blank_columns(self, size: int) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {TEACHER_LOGPROBS: np.zeros(size, np.float32)}
        if self.top_k:
            found[TOP_IDS] = np.full((size, self.top_k), -1, np.int32)
            found[TEACHER_TOP] = np.zeros((size, self.top_k), np.float32)
        return found


def behind(batch: Batch, prompts: Sequence[tuple[Ids, Ids]]) -> Batch:
    """Put other prompts in front of what came after the prompts of rows.

    The tokens under ``loss_mask`` are the same and come in the same order.

    Args:
        prompts: the prompt of each row, and the other one.

    Raises:
        CouplerError: a row does not begin with its prompt.
    """
    parts: list[Batch] = []
    for row, (read, prompt) in enumerate(prompts):
        one = batch.take([row])
        first = _end_of_prompt(one, read)
        rest = {name: column[first:] for name, column in one.tokens.items()}
        blank = {name: _blank(name, column, len(prompt)) for name, column in rest.items()}
        blank["tokens"] = np.array(prompt, one["tokens"].dtype)

        tokens = {name: np.concatenate([blank[name], column]) for name, column in rest.items()}
        length = len(tokens["tokens"])
        parts.append(Batch(np.array([length]), tokens, one.seqs))
    return Batch.concat(parts)


def _end_of_prompt(one: Batch, prompt: Ids) -> int:
    """Return how many tokens of a batch with one row are its prompt.

    Raises:
        CouplerError: it begins with something else, which no other prompt replaces.
    """
    if tuple(one["tokens"][: len(prompt)].tolist()) == prompt:
        return len(prompt)
    # The first word of an answer may have taken the end of the prompt into its token.
    if one.has(DEMONSTRATION) and one[DEMONSTRATION][0]:
        return int(np.argmax(one["loss_mask"]))

    raise CouplerError(
        f"{KEY} takes the place of a row's prompt, and an episode of row {one['row'][0]} (from 0) "
        "began with something else: the environment adds tools or an observation to the prompt, "
        "or a turn was rendered anew.\n"
        f"  try:  leaving {KEY} out, or an environment that begins with the row's prompt alone"
    )


def _blank(name: str, column: np.ndarray, length: int) -> np.ndarray:
    made = np.zeros((length, *column.shape[1:]), column.dtype)
    return made - 1 if name in OF_ENGINES else made


def find_prompts(builder: Builder, prompts: Sequence[Prompt]) -> dict[int, tuple[int, ...]]:
    """Encode what ``teacher.prompt`` shows a teacher in place of each prompt.

    Raises:
        ConfigError: the file cannot be read, or a field of it is no column of a row.
        DataError: a teacher would read more tokens than it or its engine takes.
    """
    # Read here, or it would count as an option that nothing reads.
    if not builder.config.teacher.prompt:
        return {}
    config = original(builder.config)

    text = _read(config.teacher.prompt)
    rows = [_shown(prompt.row, text) for prompt in prompts]
    whole = replace(
        config.data,
        max_prompt_tokens=2**31,
        drop_overlong=False,
        truncation=Truncation.ERROR,
    )
    encoded, _ = encode_prompts(rows, builder.codec, whole)
    found = {prompt.row.index: prompt.ids for prompt in encoded}

    limits = [builder.codec.max_positions or 0]
    for path, engine in (("engine", config.engine), ("teacher.engine", config.teacher.engine)):
        room = micro_batch_room(engine, path) if engine else None
        limits.append(room.tokens if room else 0)
    most = min((limit for limit in limits if limit), default=2**31)

    for prompt in prompts:
        longest = len(found[prompt.row.index]) + _rest(builder, prompt)
        if longest > most:
            raise DataError(
                f"{KEY}={config.teacher.prompt} makes sequences of up to {longest} tokens of row "
                f"{prompt.row.index} (from 0), and the teacher takes {most}.\n"
                "  try:  a shorter text, or a larger max_tokens_per_gpu of its engine"
            )
    return found


def _rest(builder: Builder, prompt: Prompt) -> int:
    """Return the most tokens that can follow a prompt."""
    config = original(builder.config)
    if config.environment:
        return episode_tokens(config) - len(prompt.ids)
    return config.sampling.max_tokens


def _read(path: str) -> str:
    try:
        text = read_text(Path(path))
    except DamagedFile as error:
        raise ConfigError(f"{KEY}={path}: {error}") from None
    if "prompt" not in IN_BRACES.findall(text):
        raise ConfigError(
            f"{KEY}={path} has no field {{prompt}}: the teacher would not see the task.\n"
            "  write:  {prompt} where it belongs"
        )
    return text


def _shown(row: Row, text: str) -> Row:
    """Return a row whose prompt, or its last message, is ``text`` with columns in its
    fields.
    """
    *before, last = messages_of(row.prompt, "")
    said = str(last.get("content") or "")
    values = {**row.as_mapping(), "prompt": said}
    missing = [name for name in IN_BRACES.findall(text) if name not in values]
    if missing:
        raise ConfigError(
            f"{KEY} has a field {{{missing[0]}}}, which row {row.index} (from 0) has no column "
            f"for.\n  it has:  {', '.join(sorted(values))}; text in braces is written with a "
            "space, as in { x }"
        )

    filled = IN_BRACES.sub(lambda found: str(values[found[1]]), text)
    if isinstance(row.prompt, str):
        return replace(row, prompt=filled)
    return replace(row, prompt=[*before, {**last, "content": filled}])


def make_teaching(
    builder: Builder,
    policy: EngineGroup,
    teachers: Mapping[str, EngineGroup],
    prompts: Sequence[Prompt],
    shown: Mapping[int, tuple[int, ...]],
    residency: Residency,
) -> dict[str, Teaching]:
    """Make what asks the teachers, or the policy where there are none.

    Returns:
        It, by the name of its column.
    """
    names: dict[int, str] = {}
    if teachers.keys() - {ALL_ROWS}:
        names = {prompt.row.index: str(prompt.row.extra[COLUMN]) for prompt in prompts}

    engines = teachers or {ALL_ROWS: policy}
    both = {p.row.index: (p.ids, shown[p.row.index]) for p in prompts if shown}
    if TEACHER_TOP not in builder.algorithm.needs:
        return {TEACHER_LOGPROBS: Teaching(engines, names, both, residency)}
    vocabulary = 1 + max(builder.codec.tokenizer.get_vocab().values())
    top_k = builder.config.teacher.top_k
    teaching = Teaching(
        engines,
        names,
        both,
        residency,
        top_k,
        vocabulary,
    )
    return {TEACHER_TOP: teaching}
