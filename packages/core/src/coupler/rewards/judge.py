"""Ask a language model for a verdict on a finished episode, and read its number."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from coupler.data import Codec, Prompt
from coupler.errors import ConfigError, CouplerError
from coupler.interfaces import Completion, Message, Request
from coupler.metrics import Metric, Metrics
from coupler.rewards.opinions import Episode, Opinion
from coupler.rewards.options import JudgeConfig
from coupler.rewards.result import Invalid
from coupler.system.files import DamagedFile, read_text
from coupler.system.seeding import derive
from coupler.system.words import IN_BRACES

FIELDS = ("prompt", "completion", "answer", "conversation")
_FIELD = re.compile(r"\{(" + "|".join(FIELDS) + r")\}")
# what the policy said is in one of them
THEIRS = {"completion", "conversation"}

Generate = Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True, slots=True)
class Question:
    """The text that a judge is asked, and the pattern that reads its verdict."""

    text: str
    pattern: re.Pattern[str]

    @staticmethod
    def of(config: JudgeConfig) -> Question:
        """Read ``judge.prompt`` and ``judge.pattern``.

        Raises:
            ConfigError: the file is missing, lacks what the policy said or has a field
                that nothing fills, or the pattern is none with a group.
        """
        return Question(_question(config.prompt), _pattern(config.pattern))

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the text with every field filled, in one pass.

        What stands in a value is text, also where it looks like a field.
        """
        return _FIELD.sub(lambda found: values[found[1]], self.text)

    def read(self, verdict: str) -> float | Invalid:
        """Return the number of the last match in a verdict."""
        found = [match[1] for match in self.pattern.finditer(verdict)]
        if not found or found[-1] is None:
            return Invalid("the judge gave no number")
        try:
            number = float(found[-1])
        except ValueError:
            return Invalid(f"judge.pattern read {found[-1][:100]!r} in the verdict, and no number")
        return number if isfinite(number) else Invalid(f"the judge gave the number {number}")


def _question(path: str) -> str:
    if not path:
        raise ConfigError(
            "judge.prompt is empty: set it to a text file with {completion}, which asks the judge."
        )
    try:
        text = read_text(Path(path))
    except DamagedFile as error:
        raise ConfigError(f"judge.prompt={path}: {error}") from None

    if not THEIRS.intersection(_FIELD.findall(text)):
        raise ConfigError(
            f"judge.prompt={path} has no field {{completion}}: the judge would not see what the "
            "policy said.\n  write:  {completion} where its text belongs, or {conversation} for "
            "all turns"
        )
    for name in IN_BRACES.findall(text):
        if name not in FIELDS:
            raise ConfigError(
                f"judge.prompt={path} has a field {{{name}}}, which nothing fills.\n"
                f"  the fields:  {', '.join(f'{{{known}}}' for known in FIELDS)}; text in braces "
                "is written with a space, as in { x }"
            )
    return text


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(f"judge.pattern={text} is no regular expression: {error}.") from None
    if not pattern.groups:
        raise ConfigError(
            f"judge.pattern={text} has no group (...): its first one is the number in a verdict."
        )
    return pattern


class Judge:
    """Asks a language model for a verdict on each episode.

    Args:
        generate: samples from the judge.
        room: the most tokens of question and verdict together.
        alone: one episode at a time, so that equal runs have equal bits.
    """

    def __init__(
        self,
        codec: Codec,
        generate: Generate,
        question: Question,
        config: JudgeConfig,
        *,
        room: int,
        seed: int,
        alone: bool = False,
    ) -> None:
        self.codec, self.generate, self.question = codec, generate, question
        self.max_tokens, self.temperature = config.max_tokens, config.temperature
        self.room, self.seed = room, seed

        self.stop = codec.stop_ids(())
        self.turn = asyncio.Lock() if alone else nullcontext()
        self._tokens: list[int] = []
        self._cut, self._invalid = 0, 0

    async def ask(self, prompt: Prompt, episode: Episode) -> Opinion | Invalid:
        """Return the verdict on an episode, with the number in it.

        There is none if the question is too long for the judge.
        """
        values = {
            "completion": episode.completion,
            "answer": prompt.row.answer,
            "prompt": shown(prompt.messages),
            "conversation": shown(episode.conversation(prompt)),
        }
        try:
            ids = self.codec.prompt_ids(self.question.fill(values), "")
        except CouplerError as error:
            return Invalid(f"the judge: {str(error).splitlines()[0]}")
        if len(ids) + self.max_tokens > self.room:
            return Invalid(
                f"the judge takes {self.room} tokens, and the question has {len(ids)} before a "
                f"verdict of judge.max_tokens={self.max_tokens}"
            )

        seed = derive(self.seed, "judge", prompt.row.index, episode.completion)
        async with self.turn:
            done = await self.generate(
                Request(ids, self.max_tokens, self.temperature, self.stop, seed)
            )
        verdict = self.codec.decode(done.tokens)
        number = self.question.read(verdict)
        self._tokens.append(len(done.tokens))
        self._cut += done.finish == "length"
        self._invalid += isinstance(number, Invalid)
        return Opinion(verdict, number)

    def metrics(self) -> Metrics:
        """Return how long verdicts were, and how many were cut or had no number."""
        tokens, self._tokens = self._tokens, []
        cut, self._cut = self._cut, 0
        invalid, self._invalid = self._invalid, 0

        return {
            "judge/tokens": Metric(sum(tokens), len(tokens)),
            "judge/truncated": Metric(cut, len(tokens)),
            "judge/invalid_rate": Metric(invalid, len(tokens)),
        }


def shown(messages: Sequence[Message]) -> str:
    """Return messages as a judge reads them: one alone, or all with their roles."""
    if len(messages) == 1:
        return _content(messages[0])
    return "\n\n".join(f"{message['role']}: {_content(message)}" for message in messages)


def _content(message: Message) -> str:
    """Return the text of a message, and the tools that it calls."""
    parts = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or ():
        called = call["function"]
        arguments = json.dumps(called["arguments"])
        parts.append(f"[calls {called['name']}({arguments})]")
    return "\n".join(filter(None, parts))
