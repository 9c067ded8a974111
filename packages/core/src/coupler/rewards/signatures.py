"""Tell by its parameters how a reward function is called, and call it so.

There are three signatures: Coupler's own, that of TRL's trainers, and that of verl. A
function of one of the last two is used as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import Any

from coupler.errors import CouplerError
from coupler.rewards.result import Graded, Invalid
from coupler.rewards.value import Checked, checked, each

# A function takes one completion, or all of a prompt at once.
COMPLETIONS = ("completion", "completions")
KEYWORDS = (*COMPLETIONS, "answer", "row", "prompt")
# What models say of an episode before the call, and the option that asks for it.
OPINIONS = {"score": "reward_model.model.path", "verdict": "judge.model.path"}
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
# TRL's trainers pass these, and have them alone.
ONLY_TRL = ("completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric")
# TRL's functions say None of rows that are for others.
SKIPPED = "returned None, and no other function scores it"
# TRL passes no column with one of these names.
NO_COLUMN = frozenset({"prompt", "completion", "prompts", "completions", *ONLY_TRL})

# texts of the completions, answer, row
Call = tuple[Sequence[str], str, Mapping[str, Any]]


class Kind(StrEnum):
    """Whose signature a function has."""

    OWN = "Coupler"
    TRL = "TRL"
    VERL = "verl"


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function, by name, and those without a default."""

    names: frozenset[str]
    required: frozenset[str]
    # It has **keywords.
    anything: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """Read them.

        Raises:
            TypeError, ValueError: ``function`` has none to read.
        """
        found = inspect.signature(function).parameters.values()
        stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

        return cls(
            frozenset(p.name for p in named),
            frozenset(p.name for p in found if p.default is p.empty and p.kind not in stars),
            any(p.kind is p.VAR_KEYWORD for p in found),
        )

    def without(self, args: Collection[str]) -> Parameters:
        """Return those that are left where the configuration gives ``args``."""
        given = frozenset(args)
        return Parameters(self.names - given, self.required - given, self.anything)

    @property
    def kind(self) -> Kind:
        """Return whose signature this is.

        TRL's has ``completions``, and ``prompts`` or ``**columns``. verl's has
        ``solution_str``.
        """
        names = self.names

        if "solution_str" in names and names.isdisjoint(COMPLETIONS):
            return Kind.VERL
        columns = self.anything and names.isdisjoint(("row", "prompt"))
        if "completions" in names and "completion" not in names and ("prompts" in names or columns):
            return Kind.TRL
        return Kind.OWN

    def misfit(self, opinions: Sequence[str] = ()) -> str:
        """Return why nothing can call a function with them, or an empty text.

        Args:
            opinions: columns of what models say, which every row has.
        """
        known = {*KEYWORDS, *opinions}
        if self.kind is Kind.TRL:
            lost = sorted(self.required.intersection(ONLY_TRL))
            return f"requires {', '.join(lost)}, which only TRL's trainer has" if lost else ""
        if self.kind is Kind.VERL:
            known = set(VERL)

        extra = sorted(self.required - known)
        problems = [f"requires {', '.join(extra)}, which nothing passes"] if extra else []
        if self.kind is Kind.OWN:
            if not self.anything and self.names.isdisjoint(COMPLETIONS):
                problems.append("does not take completion or completions")
            if self.names.issuperset(COMPLETIONS):
                problems.append("takes both completion and completions")
        return " and ".join(problems)

    def keywords(self, opinions: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the keywords of Coupler's own signature that the function takes."""
        known = [*KEYWORDS, *opinions]
        if self.anything and "completions" not in self.names:
            known.remove("completions")
        return tuple(name for name in known if self.anything or name in self.names)


class Signature:
    """Calls a function by the signature that it has.

    Attributes:
        takes_group: it takes all completions of a prompt at once.
        takes_batch: it takes those of several prompts at once.
        is_async: its call returns something to await.
        columns: those that it cannot do without.

    Args:
        args: keyword arguments of every call, of a class those that make it.
        opinions: columns of what models say of an episode.

    Raises:
        CouplerError: it is no function, nothing passes what it requires, or it does not
            take ``args``.
    """

    def __init__(
        self,
        function: Any,
        target: str,
        opinions: Sequence[str] = (),
        args: Mapping[str, Any] | None = None,
    ) -> None:
        self.args, self.opinions = dict(args or {}), tuple(opinions)
        if isinstance(function, type):
            _check_args(function, target, self.args)
            function, self.args = function(**self.args), {}

        try:
            whole = Parameters.of(function)
        except (TypeError, ValueError):
            raise CouplerError(
                f"the reward {target} is a {type(function).__name__}, not a function."
            ) from None
        kind = whole.kind
        passed = (*KEYWORDS, *opinions, "prompts", *VERL)
        if self.args:
            _check_args(function, target, self.args, passed)
        left = whole.without(self.args)
        if why := left.misfit(opinions):
            raise CouplerError(_refusal(function, target, why, left, opinions))

        self.function, self.parameters, self.kind = function, left, kind
        self.keywords = left.keywords(opinions)
        self.takes_batch = kind is Kind.TRL
        self.takes_group = self.takes_batch or (kind is Kind.OWN and "completions" in self.keywords)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        needed = left.required - {"prompts", "completions"}
        self.columns = sorted(needed) if self.takes_batch else []

    def facts(self) -> dict[str, Any]:
        """Return what the caller must know, as plain JSON."""
        return {
            "group": self.takes_group,
            "batch": self.takes_batch,
            "async": self.is_async,
            "columns": self.columns,
            "said": self.said,
        }

    @property
    def said(self) -> str:
        """Say in words how it is called, where that is not Coupler's own way."""
        if self.kind is Kind.OWN:
            return ""
        how = "with data_source, solution_str, ground_truth and extra_info"
        if self.kind is Kind.TRL:
            how = "with prompts, completions and columns as lists, for several prompts at once"
        return f"has the signature of {self.kind}, and is called so: {how}"

    def call(self, calls: Sequence[Call]) -> Any:
        """Call the function. More than one call at once takes :attr:`takes_batch`."""
        given: dict[str, Any]
        texts, answer, row = calls[0]

        if self.kind is Kind.TRL:
            given = self._lists(calls)
        elif self.kind is Kind.VERL:
            given = self._of_verl(texts[0], answer, row)
        else:
            known = {"completion": texts[0], "completions": texts, "answer": answer, "row": row}
            known |= {"prompt": row.get("prompt"), **{name: row.get(name) for name in OPINIONS}}
            given = {name: known[name] for name in self.keywords}
        return self.function(**self.args, **given)

    def read(self, value: Any, calls: Sequence[Call]) -> list[Checked]:
        """Return what the function said of each completion of all ``calls``.

        Raises:
            BaseException: whatever the value's own methods raise.
        """
        if self.takes_batch and isinstance(value, list):
            value = [Invalid(SKIPPED) if one is None else one for one in value]

        if self.takes_group:
            return each(value, sum(len(texts) for texts, _, _ in calls))
        if self.kind is Kind.VERL and isinstance(value, dict) and "score" in value:
            value = _graded(value)
        return [checked(value)]

    def _of_verl(self, text: str, answer: str, row: Mapping[str, Any]) -> dict[str, Any]:
        given = {
            "data_source": row.get("data_source", ""),
            "solution_str": text,
            "ground_truth": _ground_truth(answer, row),
            "extra_info": row.get("extra_info"),
        }
        return {name: given[name] for name in VERL if name in self.parameters.names}

    def _lists(self, calls: Sequence[Call]) -> dict[str, list[Any]]:
        """Return prompts, completions and columns, one entry for each completion."""
        rows = [row for _, _, row in calls]
        names = {name for row in rows for name in row} | self.parameters.names
        if not self.parameters.anything:
            names &= self.parameters.names
        names -= NO_COLUMN | self.args.keys()

        given: dict[str, list[Any]] = {name: list(self._column(name, calls)) for name in names}
        for name in names - {key for row in rows for key in row} - self.parameters.required:
            del given[name]
        if "prompts" in self.parameters.names or self.parameters.anything:
            given["prompts"] = [row.get("prompt") for texts, _, row in calls for _ in texts]
        given["completions"] = [_shaped(text, row) for texts, _, row in calls for text in texts]
        return given

    def _column(self, name: str, calls: Sequence[Call]) -> Iterator[Any]:
        for texts, _, row in calls:
            # A model says something of each completion.
            yield from row[name] if name in self.opinions else [row.get(name)] * len(texts)


def _shaped(text: str, row: Mapping[str, Any]) -> Any:
    """Return a completion in the shape that TRL gives it where the prompt is a chat."""
    chat = not isinstance(row.get("prompt", ""), str)
    return [{"role": "assistant", "content": text}] if chat else text


def _ground_truth(answer: str, row: Mapping[str, Any]) -> Any:
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    return row.get("ground_truth", answer)


def _graded(value: Mapping[Any, Any]) -> Graded:
    """Read a dict with ``score``. Its numbers are parts, and ``pred`` is the answer."""
    parts: dict[str, Any] = {
        key: part for key, part in value.items() if key != "score" and isinstance(part, Real)
    }
    pred = value.get("pred")
    return Graded(value["score"], pred if isinstance(pred, str) else None, parts)


def _check_args(
    function: Any, target: str, args: Mapping[str, Any], passed: Sequence[str] = ()
) -> None:
    """Refuse arguments of the configuration that a function or a class does not take.

    Raises:
        CouplerError: it does not, or ``passed`` names one that every call has.
    """
    if taken := sorted(args.keys() & {*passed}):
        raise CouplerError(
            f"args of the reward {target} have {taken[0]}, which every call passes: leave it out."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return

    try:
        (signature.bind if isinstance(function, type) else signature.bind_partial)(**args)
    except TypeError as error:
        raise CouplerError(
            f"the args {{{', '.join(args)}}} do not fit the reward {target}{signature}: {error}."
        ) from None


def _refusal(
    function: Any, target: str, why: str, parameters: Parameters, opinions: Sequence[str]
) -> str:
    lacks = [
        f"{name} comes with {key}" for name, key in OPINIONS.items() if name in parameters.required
    ]
    absent = "".join(f"\n  try:  {text}" for text in lacks if text.split()[0] not in opinions)
    keywords = taken_by(parameters, opinions)
    return (
        f"the reward {target}{inspect.signature(function)} {why}.\n"
        f"  it is called with the keywords it takes among:  {keywords}{absent}"
    )


def taken_by(parameters: Parameters, opinions: Sequence[str]) -> str:
    """List the keywords that a function with ``parameters`` may take."""
    if parameters.kind is Kind.TRL:
        return "prompts, completions, and every column of the rows"
    return ", ".join(VERL if parameters.kind is Kind.VERL else (*KEYWORDS, *opinions))
