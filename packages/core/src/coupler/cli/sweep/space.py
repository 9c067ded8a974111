"""Read the options of a sweep: values in Hydra's grammar, such as ``seed=1,2``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from coupler.config.options import SECTIONS
from coupler.config.overrides import MAX_OVERRIDE, parse_overrides
from coupler.errors import ConfigError
from coupler.system.plain_values import holds_text

# Runs of one sweep, all of which are checked before the first one.
MAX_RUNS = 1000
SWEEPER = "hydra/sweeper"
# Options of Hydra that a user may set. The others are about folders and logs.
USERS = (SWEEPER, "hydra/launcher", "hydra.sweeper.", "hydra.launcher.")


@dataclass(frozen=True, slots=True)
class Swept:
    """One option with several values.

    Attributes:
        key: the key in full.
        text: the values as they were typed.
        overrides: one override for each value, or for both ends of an interval.
    """

    key: str
    text: str
    overrides: list[str]


@dataclass(frozen=True, slots=True)
class Space:
    """The options of a sweep.

    Attributes:
        fixed: overrides of every run.
        of_hydra: options of sweeper and launcher.
        searched: a sweeper chooses values by itself, one run after the other.
    """

    swept: list[Swept]
    fixed: list[str]
    of_hydra: list[str]
    searched: bool

    def combinations(self) -> list[list[str]]:
        """Return the overrides of each run that can be told before the first one.

        Of a search these are the first value of every key, and each other value with
        the first ones of all other keys.
        """
        listed = [each.overrides for each in self.swept]
        if not self.searched:
            return [[*each] for each in product(*listed)]

        first = [values[0] for values in listed]
        others = [
            [*first[:place], value, *first[place + 1 :]]
            for place, values in enumerate(listed)
            for value in values[1:]
        ]
        return [first, *others]


def read_space(overrides: Sequence[str]) -> Space:
    """Tell swept options from others.

    Raises:
        ConfigError: nothing is swept, too much is, or a key is given twice.
    """
    parser = OverridesParser.create()
    of_hydra = [_of_hydra(text) for text in overrides if _is_of_hydra(text)]
    chosen = [text.partition("=")[2] for text in of_hydra if text.startswith(f"{SWEEPER}=")]
    searched = chosen not in ([], ["basic"])

    swept, fixed = [], []
    for text in overrides:
        if _is_of_hydra(text):
            continue
        override = _parsed(parser, text)
        if override is not None and override.is_sweep_override():
            swept.append(_swept(text, override, searched))
        else:
            fixed.append(text)

    _check_keys([each.key for each in swept], fixed)
    space = Space(swept, fixed, of_hydra, searched)
    _check_number(space)
    return space


def label(key: str) -> str:
    """Return a key as users write it: ``engine`` for ``engine.name``."""
    section = key.removesuffix(".name")
    return section if section in SECTIONS else key


def _is_of_hydra(text: str) -> bool:
    return text.lstrip("+~").startswith(("hydra.", "hydra/"))


def _of_hydra(text: str) -> str:
    """Return an option of Hydra that a user may set."""
    if not text.startswith(USERS) or "=" not in text or text.startswith("hydra.sweeper.params"):
        raise ConfigError(
            f"{text[:200]} is no option of a sweep.\n"
            "  Hydra's options here:  hydra/sweeper=NAME, hydra/launcher=NAME, "
            "hydra.sweeper.KEY=VALUE and hydra.launcher.KEY=VALUE\n"
            "  values to sweep:  KEY=VALUE,VALUE"
        )
    return text


def _parsed(parser: OverridesParser, text: str) -> Override | None:
    """Parse an override, or return None where composing it will say what is wrong."""
    if not holds_text(text) or len(text) > MAX_OVERRIDE or "=" not in text:
        return None
    try:
        return parser.parse_override(text.lstrip("+"))
    except (HydraException, ValueError, RecursionError):
        return None


def _swept(text: str, override: Override, searched: bool) -> Swept:
    typed, _, values = text.lstrip("+").partition("=")
    listed = list(islice(_values(typed, values, override, searched), MAX_RUNS + 1))
    if not listed:
        raise ConfigError(f"{typed}={values} has no value.\n  write it as:  {typed}=VALUE,VALUE")
    keys = [parse_overrides([f"{typed}={value}"])[0][0] for value in listed]
    overrides = [f"{key}={value}" for key, value in zip(keys, listed, strict=True)]
    return Swept(keys[0], values, overrides)


def _values(key: str, text: str, override: Override, searched: bool) -> Iterator[str]:
    """Yield the values of a sweep, and of an interval both ends."""
    value = override.value()
    if isinstance(value, RangeSweep) and _length(value) > MAX_RUNS:
        raise ConfigError(_too_many(key))
    if override.is_discrete_sweep() and not isinstance(value, Glob):
        yield from override.sweep_string_iterator()
        return

    if not isinstance(value, IntervalSweep):
        raise ConfigError(f"{key}={text} names no values.\n  write it as:  {key}=VALUE,VALUE")
    if not searched:
        raise ConfigError(
            f"{key}={text} is an interval, and only a search takes one.\n"
            f"  try:  {key}=VALUE,VALUE, or {SWEEPER}=optuna with hydra-optuna-sweeper installed"
        )
    yield from (str(value.start), str(value.end))


def _length(values: RangeSweep) -> float:
    """Return about how many values a range has, without making them."""
    start, stop = values.start or 0, values.stop or 0
    return abs((stop - start) / values.step) if values.step else 0


def _too_many(keys: str) -> str:
    return (
        f"the values of {keys} make more than {MAX_RUNS} runs.\n"
        "  try:  fewer values, or several sweeps"
    )


def _check_keys(swept: Sequence[str], fixed: Sequence[str]) -> None:
    if not swept:
        raise ConfigError(
            "--multirun needs an option with several values.\n  try:  seed=1,2, for example"
        )
    if "run_dir" in swept:
        raise ConfigError(
            "run_dir takes one folder: each run of a sweep has a folder below it.\n"
            "  try:  run_dir=runs/sweep, for example"
        )

    set_once = [key for key, _ in parse_overrides([*fixed])]
    for key in swept:
        if [*swept, *set_once].count(key) > 1:
            raise ConfigError(
                f"{label(key)} is given twice.\n  try:  all of its values in one option"
            )


def _check_number(space: Space) -> None:
    number = 1
    for each in space.swept:
        number *= 1 if space.searched else len(each.overrides)
    if number > MAX_RUNS or any(len(each.overrides) > MAX_RUNS for each in space.swept):
        raise ConfigError(_too_many(", ".join(label(each.key) for each in space.swept)))
