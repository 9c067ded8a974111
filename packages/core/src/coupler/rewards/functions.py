"""Build what scores completions: one reward function, or several that are added up."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan
from typing import Any

from coupler.errors import ConfigError, CouplerError
from coupler.metrics import Metrics
from coupler.rewards.options import RewardConfig, RewardFunction
from coupler.rewards.pool import RewardPool
from coupler.rewards.process import Limits
from coupler.rewards.result import Invalid, Scored
from coupler.rewards.signatures import OPINIONS, SKIPPED
from coupler.rewards.tally import Tally
from coupler.rewards.value import FLOAT32_MAX, judged

Sample = tuple[str, str, Mapping[str, Any]]  # completion, answer, row


class RewardFunctions:
    """Several reward functions, whose numbers are added up by weight.

    Each has processes of its own, with its own limits of time and memory. A row is
    scored by those whose ``sources`` have its ``data_source``. What each said, before
    its weight, is the part NAME of the reward, and its own parts are NAME/PART. The
    part of a function that does not score the row is NaN. A completion is invalid if
    any of its functions gave no number.

    Args:
        functions: by name, in the order in which they are added.
        pools: the processes of each.
    """

    target = "reward.functions"

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        pools: Mapping[str, RewardPool],
        max_invalid_fraction: float,
    ) -> None:
        self.functions, self.pools = functions, pools
        self.tally = Tally(self.target, self.target, max_invalid_fraction)

    def begin(self) -> None:
        """Start the processes of all functions, as :meth:`RewardPool.begin` does."""
        for pool in self.pools.values():
            pool.begin()

    def start(self) -> None:
        """Start the processes of all functions side by side, and wait for them.

        Raises:
            CouplerError: one cannot be used, as :meth:`RewardPool.start` says.
        """
        try:
            self.begin()
            for pool in self.pools.values():
                pool.start()
        except CouplerError:
            self.close()
            raise

    def close(self) -> None:
        """Kill every process. Calls under way fail."""
        for pool in self.pools.values():
            pool.close()

    @property
    def takes_group(self) -> bool:
        """Return whether any function takes all completions of a prompt at once."""
        return any(pool.takes_group for pool in self.pools.values())

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse rows without a column that a function cannot do without.

        A function with ``sources`` may have columns of its own rows alone.
        """
        for pool in self.pools.values():
            pool.check_columns(columns)

    async def score(self, completion: str, answer: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion, and count it, as :meth:`RewardPool.score` does."""
        return (await self.score_group([completion], answer, row))[0]

    async def score_group(
        self, completions: Sequence[str], answer: str, row: Mapping[str, Any]
    ) -> list[Scored]:
        """Score completions of a prompt, and count them."""
        if not completions:
            return []
        scored = await self._added(completions, answer, row)
        for one in scored:
            self.count(one)
        return scored

    async def call(self, completion: str, answer: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion without counting it, and never stop the run."""
        return (await self._added([completion], answer, row))[0]

    def count(self, scored: Scored) -> None:
        """Count a result, as :meth:`Tally.count` does."""
        self.tally.count(scored)

    def metrics(self) -> Metrics:
        """Return rates and the longest call (seconds) since the last call of this."""
        return self.tally.metrics()

    async def _added(
        self, completions: Sequence[str], answer: str, row: Mapping[str, Any]
    ) -> list[Scored]:
        source = str(row.get("data_source", ""))
        names = [name for name, one in self.functions.items() if one.scores(source)]
        if not names:
            none = judged(None, f"no function of reward.functions scores data_source={source!r}")
            return [none] * len(completions)

        asked = (self._ask(self.pools[name], completions, answer, row) for name in names)
        found = dict(zip(names, await asyncio.gather(*asked), strict=True))
        return [
            self._sum({name: each[i] for name, each in found.items()})
            for i in range(len(completions))
        ]

    async def _ask(
        self, pool: RewardPool, completions: Sequence[str], answer: str, row: Mapping[str, Any]
    ) -> list[Scored]:
        """Ask one function, which may take one completion at a time."""
        if pool.takes_group:
            scored = await pool.ask(completions, answer, row)
        else:
            calls = (
                pool.call(text, answer, self._row_of(row, i)) for i, text in enumerate(completions)
            )
            scored = await asyncio.gather(*calls)

        for one in scored:
            pool.tally.check_parts(one)
        return list(scored)

    def _row_of(self, row: Mapping[str, Any], i: int) -> Mapping[str, Any]:
        """Return the row of one completion, where opinions are lists of all."""
        if not self.takes_group:
            return row
        return {**row, **{name: row[name][i] for name in OPINIONS if name in row}}

    def _sum(self, found: Mapping[str, Scored]) -> Scored:
        """Add up what functions gave for one completion."""
        answers = (one.answer for one in found.values() if one.answer is not None)
        about = {
            "seconds": max(one.seconds for one in found.values()),
            "timed_out": any(one.timed_out for one in found.values()),
        }
        total, valid, parts = 0.0, 0, dict.fromkeys(self.functions, nan)

        for name, one in found.items():
            if isinstance(one.result, Invalid):
                if one.result.reason == SKIPPED:
                    continue
                reason = f"{name}: {one.result.reason}"
                return Scored(result=Invalid(reason), detail=one.detail, **about)
            total += self.functions[name].weight * one.result
            parts[name] = one.result
            parts |= {f"{name}/{part}": number for part, number in one.parts.items()}
            valid += 1
        if not valid:
            return Scored(result=Invalid(f"{', '.join(found)}: {SKIPPED}"), **about)
        if abs(total) > FLOAT32_MAX:
            return Scored(result=Invalid(f"the sum {total:g} is beyond float32"), **about)
        return Scored(result=total, answer=next(answers, None), parts=parts, **about)


Scoring = RewardPool | RewardFunctions


def make_scoring(
    config: RewardConfig, opinions: Sequence[str] = (), *, num_workers: int = 0
) -> Scoring:
    """Build what scores completions. Nothing is started.

    Args:
        opinions: columns of every row that models add.
        num_workers: processes of each function. 0 takes ``reward.num_workers``.

    Raises:
        ConfigError: ``reward.functions`` is not what it must be.
    """
    named = config.named
    limits = Limits(config.sandbox, config.max_memory_gib, config.max_processes)
    pools = {
        key: RewardPool(
            one.target,
            num_workers or config.num_workers,
            config.timeout_s,
            config.max_invalid_fraction,
            limits,
            opinions,
            key=f"{key}.target",
            args=one.args,
            concurrency=config.concurrency,
        )
        for key, one in (named or {"reward": RewardFunction("")}).items()
    }

    if not config.functions:
        return pools["reward"]
    short = {key: key.rpartition(".")[2] for key in named}
    return RewardFunctions(
        {short[key]: one for key, one in named.items()},
        {short[key]: pool for key, pool in pools.items()},
        config.max_invalid_fraction,
    )


def check_sources(config: RewardConfig, sources: Mapping[str, str]) -> list[str]:
    """Return the ``sources`` of functions that no row has.

    Args:
        sources: the ``data_source`` of rows, with the place of one row each.

    Raises:
        ConfigError: no function scores a row.
    """
    functions = config.named if config.functions else {}

    for source, place in sources.items():
        if functions and not any(one.scores(source) for one in functions.values()):
            named = f"data_source={source}" if source else "no data_source"
            raise ConfigError(
                f"{place} has {named}, which no function of reward.functions scores.\n"
                f"  try:  {next(iter(functions))}.sources with it, or a function without sources"
            )

    return [
        f"{key}.sources={each}"
        for key, one in functions.items()
        for each in one.sources
        if each not in sources
    ]


def check_reward(
    target: str,
    samples: Iterable[Sample],
    timeout_s: float,
    limits: Limits | None = None,
    opinions: Sequence[str] = (),
) -> list[Scored]:
    """Score ``samples`` by one function, as :func:`check_rewards` does."""
    return _scored_alone(RewardPool(target, 1, timeout_s, 1.0, limits, opinions), samples)


def check_rewards(config: RewardConfig, samples: Iterable[Sample]) -> list[Scored]:
    """Score samples in one process of each function.

    Use it to try a reward out before a run. It works with and without a running event
    loop, and blocks the loop.

    Raises:
        CouplerError: a function cannot be imported, or its signature does not fit.
    """
    return _scored_alone(make_scoring(config, num_workers=1), samples)


def _scored_alone(scoring: Scoring, samples: Iterable[Sample]) -> list[Scored]:
    async def score_all() -> list[Scored]:
        return [await scoring.call(*sample) for sample in samples]

    scoring.start()
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, score_all()).result()
    finally:
        scoring.close()
