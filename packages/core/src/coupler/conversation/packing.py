"""Make one Batch of the episodes of a prompt.

An episode has one row for each path through its conversation. They share the number of
their trajectory, and its reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from coupler.batch import Batch
from coupler.batch.batch import concat
from coupler.batch.columns import DEMONSTRATION, ROUTED_EXPERTS, SAMPLING_MASK
from coupler.batch.trajectory import Origin, columns_of
from coupler.conversation.tree import Row
from coupler.data import Prompt
from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Ended
from coupler.metrics import Metrics

# the numbers that a record has for origins and endings
ORIGINS = tuple(Origin)
PARTS = "reward_parts"  # opens the names of their columns and metrics
GREEDY = "greedy_reward"  # the column [B] of the reward of the prompt's greedy episode
SOURCE = "data_source"  # the column [B] of the kind of row, as text
TOKEN_REWARD = "token_reward"  # the column [T] of the rewards of turns
TURN = "turn"  # the column [T] of the number of a token's turn in its episode
ANCHOR = "anchor"  # the column [T] of a digest of what the token's turn was shown
ENDED = {str(ended): code for code, ended in enumerate(Ended)}


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode of the policy with its reward, or a demonstration in its place.

    Attributes:
        text: what the policy said last, without special tokens.
        finish: how the episode ended.
        answer: the answer that the reward function read, if it returns one.
        turn_rewards: one for each sampled turn of all rows, in order, or none.
        parts: the numbers that the reward was made of, by name.
        greedy_reward: that of the prompt's greedy episode, where it is needed.
        opinions: what models said of the episode: ``score``, ``verdict``, or neither.
        demonstration: the answer of the prompt's row stands for an episode.
    """

    prompt: Prompt
    rows: tuple[Row, ...]
    reward: float
    text: str
    finish: str
    answer: str | None = None
    turn_rewards: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    opinions: Mapping[str, float | str] = field(default_factory=dict)
    greedy_reward: float | None = None
    metrics: Metrics = field(default_factory=dict)
    demonstration: bool = False

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled, in all turns."""
        return sum(len(done.tokens) for row in self.rows for done in row.trained)

    @property
    def truncated(self) -> bool:
        """Return whether a limit of tokens cut the episode."""
        return self.finish in ("length", "tokens")


def pack(
    samples: Sequence[Sample], group: int, samples_per_prompt: int, temperature: float
) -> Batch:
    """Make one Batch of a prompt's episodes.

    A demonstration was not sampled, and has the temperature 1.

    Raises:
        WeightSyncError: a log-prob is not finite.
        CouplerError: routes do not fit the tokens, or turn rewards the turns.
    """
    rows = [row for sample in samples for row in sample.rows]
    counts = [len(sample.rows) for sample in samples]
    lengths = [len(row.trajectory) for row in rows]
    columns = columns_of([row.trajectory for row in rows])
    if not np.isfinite(columns["rollout_logprobs"]).all():
        raise WeightSyncError(
            "a rollout sampled tokens whose log-prob is not finite, of weights version "
            f"{columns['version'].max()}.\n"
            "  look at:  the weights, which may hold a NaN; rollout.dtype; sync/probe in "
            "metrics.jsonl"
        )

    codes = [ENDED.get(sample.finish, ENDED[Ended.CUT]) for sample in samples]
    numbers = group * samples_per_prompt + np.arange(len(samples), dtype=np.int64)
    rewards = np.array([sample.reward for sample in samples], np.float32)
    truncated = np.array([sample.truncated for sample in samples])
    heat = np.array([1.0 if s.demonstration else temperature for s in samples], np.float32)
    return Batch(
        lengths=np.array(lengths, np.int64),
        tokens={
            **columns,
            **_routes(rows, lengths),
            **_masks(rows, columns["loss_mask"]),
            **_turn_rewards(samples),
            "origin": _origins(rows),
        },
        seqs={
            "reward": np.repeat(rewards, counts),
            **_parts(samples, counts),
            **_greedy(samples, len(rows)),
            "temperature": np.repeat(heat, counts),
            "group": np.full(len(rows), group, np.int64),
            "row": np.repeat([sample.prompt.row.index for sample in samples], counts),
            "trajectory": np.repeat(numbers, counts),
            "unit": np.repeat(numbers, counts),
            "truncated": np.repeat(truncated, counts),
            "ended": np.repeat(np.array(codes, np.int8), counts),
            "replica": np.array([row.completions[-1].replica for row in rows], np.int32),
        },
    )


def _parts(samples: Sequence[Sample], counts: Sequence[int]) -> dict[str, np.ndarray]:
    """Return a column of each number that rewards are made of.

    It is 0 where a function of several does not score the row. Parts of parts, which
    depend on the row, are metrics alone.
    """
    names = sorted(name for name in samples[0].parts if "/" not in name)
    found = {name: [sample.parts[name] for sample in samples] for name in names}

    return {
        f"{PARTS}/{name}": np.repeat(np.nan_to_num(np.array(numbers, np.float32)), counts)
        for name, numbers in found.items()
    }


def _greedy(samples: Sequence[Sample], num_rows: int) -> dict[str, np.ndarray]:
    """Return the column of the greedy episode's reward, if there was one."""
    reward = samples[0].greedy_reward
    return {} if reward is None else {GREEDY: np.full(num_rows, reward, np.float32)}


def with_needed(group: Batch, samples: Sequence[Sample], needs: frozenset[str]) -> Batch:
    """Add the columns of episodes that only some algorithms need.

    They are ``data_source`` [B] of the prompt's row, which is empty where the row has
    none, ``demonstration`` [B], and ``turn`` and ``anchor`` [T], which are -1 where
    nothing was sampled.
    """
    rows = [row for sample in samples for row in sample.rows]
    if DEMONSTRATION in needs:
        shown = [sample.demonstration for sample in samples for _ in sample.rows]
        group = group.with_seqs(**{DEMONSTRATION: np.array(shown)})
    if SOURCE in needs:
        source = samples[0].prompt.row.data_source
        group = group.with_seqs(**{SOURCE: np.full(len(group), source)})
    if TURN in needs:
        numbers = (number for row in rows for number in row.numbers)
        group = group.with_tokens(**{TURN: _of_turns(rows, numbers, np.int32)})

    if ANCHOR in needs:
        first = (anchor[:8] for row in rows for anchor in row.anchors)
        digests = (int.from_bytes(half, "little", signed=True) for half in first)
        group = group.with_tokens(**{ANCHOR: _of_turns(rows, digests, np.int64)})
    return group


def _of_turns(rows: Sequence[Row], values: Iterable[int], dtype: type) -> np.ndarray:
    """Return [T] the value of each token's turn, and -1 where nothing was sampled.

    Args:
        values: one for each sampled turn of all rows, in order.
    """
    left = iter(values)
    segments = [segment for row in rows for segment in row.trajectory.segments]
    each = [next(left) if segment.origin is Origin.SAMPLED else -1 for segment in segments]
    return np.repeat(np.array(each, dtype), [len(segment.ids) for segment in segments])


def ended_of(one: Batch) -> str:
    """Return how the episode of a batch with one row ended."""
    return list(ENDED)[int(one["ended"][0])]


def stretches(one: Batch) -> Iterator[tuple[Origin, slice]]:
    """Yield each stretch of tokens of one origin, in a batch with one row."""
    at = 0
    for code, same in groupby(one["origin"].tolist()):
        tokens = slice(at, at + len(list(same)))
        yield ORIGINS[code], tokens
        at = tokens.stop


def with_origins(batch: Batch) -> Batch:
    """Add the columns that a record shows to a batch that was packed without them.

    Earlier releases did so. All of their episodes had one turn. A row that is not known
    is -1.
    """
    if not batch.has("loss_mask", "truncated"):
        return batch
    if not batch.has("row"):
        batch = batch.with_seqs(row=np.full(len(batch), -1))
    if batch.has("origin"):
        return batch

    prompt, sampled = ORIGINS.index(Origin.PROMPT), ORIGINS.index(Origin.SAMPLED)
    length, stop = ENDED[Ended.LENGTH], ENDED[Ended.STOP]
    return batch.with_tokens(
        origin=np.where(batch["loss_mask"], sampled, prompt).astype(np.int8)
    ).with_seqs(ended=np.where(batch["truncated"], length, stop).astype(np.int8))


def _origins(rows: Sequence[Row]) -> np.ndarray:
    """Return [T] the origin of each token, by its place in :data:`ORIGINS`."""
    segments = [segment for row in rows for segment in row.trajectory.segments]
    codes = np.array([ORIGINS.index(segment.origin) for segment in segments], np.int8)
    return np.repeat(codes, [len(segment.ids) for segment in segments])


def _routes(rows: Sequence[Row], lengths: list[int]) -> dict[str, np.ndarray]:
    """Return the column ``routed_experts``, if the rollout was asked for it.

    Raises:
        CouplerError: routes are of another number of tokens, or lack a token that was
            fed.
    """
    found = [_routes_of(row) for row in rows]
    routes = [of_row for of_row in found if of_row is not None]
    if not routes:
        return {}

    for of_row, length in zip(routes, lengths, strict=True):
        if len(of_row) != length:
            raise CouplerError(
                f"a rollout returned the experts of {len(of_row)} tokens for a prompt and "
                f"completion of {length}.\n"
                "  look at:  Completion.routed_experts; a token that was never fed has a row of -1"
            )
        if unknown := int((of_row[:-1] < 0).any(axis=(1, 2)).sum()):
            raise CouplerError(
                f"a rollout left out the experts of {unknown} of the {length - 1} tokens that "
                "it was fed.\n"
                "  look at:  Completion.routed_experts; only the last token, which nothing "
                "was sampled after, may have -1\n"
                "  try:      router_replay=R2, which does not ask it"
            )
    return {ROUTED_EXPERTS: np.concatenate(routes)}


def _routes_of(row: Row) -> np.ndarray | None:
    """Return the routes of a row: those of each turn when it was sampled first."""
    routes = [done.routed_experts for done in row.completions]
    if routes[-1] is None or len(routes) == 1:
        return routes[-1]

    joined = np.array(routes[-1])
    for of_turn in reversed(routes[:-1]):
        # The last token of a turn was fed by the next one.
        if of_turn is not None:
            joined[: len(of_turn) - 1] = of_turn[:-1]
    return joined


def _masks(rows: Sequence[Row], sampled: np.ndarray) -> dict[str, np.ndarray]:
    """Return the column ``sampling_mask``, if the rollout was asked for it.

    Args:
        sampled: [T] True at trained tokens. Rows of the others are -1.
    """
    # a demonstration has one completion, which the policy did not sample
    masks = [done.sampling_mask for row in rows for done in row.trained or row.completions]
    if masks[0] is None:
        return {}

    kept = concat(masks)
    column = np.full((len(sampled), kept.shape[1]), -1, np.int32)
    column[sampled] = kept
    return {SAMPLING_MASK: column}


def _turn_rewards(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return the column ``token_reward``, if episodes have rewards of their turns.

    Each stands at the last token of its turn. An episode without them, among others
    that have some, has its reward at its last turn.

    Raises:
        CouplerError: an episode has another number of them than of turns, or one that
            is not finite.
    """
    if not any(sample.turn_rewards for sample in samples):
        return {}

    found: list[np.ndarray] = []
    for sample in samples:
        turns = [done for row in sample.rows for done in row.trained]
        given = sample.turn_rewards or (*[0.0] * (len(turns) - 1), sample.reward)[: len(turns)]
        if len(given) != len(turns):
            raise CouplerError(
                f"an episode of {len(turns)} turns has {len(given)} turn rewards.\n"
                "  look at:  Outcome.turn_rewards of the environment, one for each sampled turn"
            )
        if not np.isfinite(np.array(sample.turn_rewards, np.float32)).all():
            raise CouplerError(
                f"an episode has the turn rewards {', '.join(map(str, sample.turn_rewards))}.\n"
                "  look at:  Outcome.turn_rewards of the environment, finite numbers of float32"
            )
        left = iter(given)
        for segment in (s for row in sample.rows for s in row.trajectory.segments):
            column = np.zeros(len(segment.ids), np.float32)
            if segment.origin is Origin.SAMPLED:
                column[-1:] = next(left)
            found.append(column)
    return {TOKEN_REWARD: np.concatenate(found)}


def joined(parts: Sequence[Batch]) -> Batch:
    """Make one Batch of several groups, or of the parts of a step.

    Where some have rewards of turns and others do not, as those whose episodes were all
    ended by a limit, an episode of the others has its reward at its last turn.
    """
    if any(part.has(TOKEN_REWARD) for part in parts):
        parts = [part if part.has(TOKEN_REWARD) else _at_the_end(part) for part in parts]
    return Batch.concat(parts)


def _at_the_end(batch: Batch) -> Batch:
    """Add ``token_reward``, with the reward of each episode at its last token."""
    _, of_row = batch.trajectories()
    backwards = np.flatnonzero(batch["loss_mask"])[::-1]
    episodes = batch.spread(of_row)[backwards]
    _, first = np.unique(
        episodes,
        return_index=True,
    )
    last = backwards[first]

    column = np.zeros(batch.num_tokens, np.float32)
    column[last] = batch.spread(batch["reward"])[last]
    return batch.with_tokens(**{TOKEN_REWARD: column})
