"""Turn prompts into scored groups in the Buffer, continuously.

Generation and rewards of all prompts overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.batch import concat
from coupler.batch.columns import ROUTED_EXPERTS, SAMPLING_MASK
from coupler.batch.trajectory import Origin, Segment, Trajectory, columns_of
from coupler.data import Codec, Prompt, PromptStream
from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Algorithm, Completion, Request
from coupler.loop.buffer import Buffer
from coupler.loop.rollout_group import RolloutGroup
from coupler.metrics import Metric, Metrics, merge
from coupler.rewards import Invalid, RewardPool
from coupler.system.seeding import derive


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """One sampled completion with its reward."""

    prompt: Prompt
    completion: Completion
    reward: float
    # the answer that the reward function read, if it returns one
    answer: str | None = None

    def trajectory(self) -> Trajectory:
        """Return the prompt and the completion as segments."""
        done = self.completion
        sampled = Segment(done.tokens, Origin.SAMPLED, done.logprobs, done.versions)
        return Trajectory((Segment(self.prompt.ids, Origin.PROMPT), sampled))


class Scorer:
    """Samples completions of a prompt and scores each, for training and evaluation."""

    def __init__(
        self, rollouts: RolloutGroup, rewards: RewardPool, codec: Codec, stop: tuple[int, ...]
    ) -> None:
        self.rollouts, self.rewards, self.codec, self.stop = rollouts, rewards, codec, stop
        self.names = count()

    async def sample(
        self,
        prompt: Prompt,
        seeds: list[int],
        request: Request,
        *,
        groups: int,
    ) -> list[ScoredCompletion]:
        """Return one scored completion per seed, without those of invalid rewards.

        The reward pool counts the invalid ones.

        Args:
            request: what is asked for, but for prompt, stop tokens, seed and session.
            groups: calls that run side by side, this one included. If they are enough
                to load all replicas evenly, a call's completions come from one replica,
                which computes the prompt once.
        """
        router, session = self.rollouts.router, ""
        if router.keeps_whole(groups):
            session = f"group {next(self.names)}"
            router.begin(session)
        first = replace(request, prompt=prompt.ids, stop=self.stop, session=session)

        try:
            found = await asyncio.gather(
                *(self._one(prompt, replace(first, seed=seed)) for seed in seeds)
            )
        finally:
            router.end(session)
        return [scored for scored in found if scored]

    async def _one(self, prompt: Prompt, request: Request) -> ScoredCompletion | None:
        row, waits = prompt.row, self.rollouts.executor.waits
        with waits.named("prompts", "completions", [row.index]):
            completion = await self.rollouts.generate(request)
        with waits.named("prompts", "rewards", [row.index]):
            scored = await self.rewards.score(
                self.codec.decode(completion.tokens), row.answer, row.as_mapping()
            )
        if isinstance(scored.result, Invalid):
            return None
        return ScoredCompletion(prompt, completion, scored.result, scored.answer)


class Sampler:
    """Keeps the Buffer full.

    Consumes prompts, waits for the Buffer's admission, and produces scored groups
    there. A rejected group (dynamic sampling) only makes it ask for another. With
    ``in_waves`` it asks once every running group is scored, so that the batches of the
    rollout do not depend on the duration of rewards. A failure of any group ends the
    run through :meth:`Buffer.fail`.
    """

    def __init__(
        self,
        request: Request,
        samples_per_prompt: int,
        seed: int,
        *,
        prompts: PromptStream[Prompt],
        scorer: Scorer,
        algorithm: Algorithm,
        buffer: Buffer,
        in_waves: bool = False,
    ) -> None:
        self.in_waves, self.request = in_waves, request
        self.samples_per_prompt, self.seed = samples_per_prompt, seed
        self.prompts, self.scorer, self.algorithm, self.buffer = prompts, scorer, algorithm, buffer

        # by admission number
        self.seen: dict[int, Metrics] = {}
        # admission number -> row of prompts
        self.unfinished: dict[int, int] = {}

    async def run(self) -> None:
        """Sample until cancelled."""
        groups: set[asyncio.Task[None]] = set()

        def start(number: int) -> None:
            task = asyncio.create_task(
                self._group(number, self.prompts.rows[self.unfinished[number]])
            )
            groups.add(task)
            task.add_done_callback(groups.discard)

        try:
            # those that the resumed run left unfinished come first
            for number in sorted(self.unfinished):
                start(number)
            while True:
                if self.in_waves and not self.buffer.has_room():
                    await asyncio.gather(*groups)
                number = await self.buffer.admit()
                self.unfinished[number] = self.prompts.next()
                start(number)
        except Exception as error:
            await self.buffer.fail(error)
        finally:
            for task in groups:
                task.cancel()

    async def _group(self, number: int, prompt: Prompt) -> None:
        try:
            seeds = [derive(self.seed, "sample", number, i) for i in range(self.samples_per_prompt)]
            scored = await self.scorer.sample(
                prompt, seeds, self.request, groups=self.buffer.prompts_per_step
            )

            if len(scored) < min(2, self.samples_per_prompt):
                await self.buffer.reject(number, "its rewards are invalid")
            else:
                await self._offer(number, scored)
            # Nothing else ran since the buffer took the group, so no checkpoint can
            # hold it in both places.
            del self.unfinished[number]
        except Exception as error:
            # The error of a background task has to reach the trainer.
            await self.buffer.fail(error)

    async def _offer(self, number: int, scored: list[ScoredCompletion]) -> None:
        group = pack(scored, number, self.samples_per_prompt, self.request.temperature)
        kept = self.algorithm.keep(group)
        self.seen[number] = _describe(scored, group, kept)
        if kept:
            await self.buffer.put(number, group)
        else:
            await self.buffer.reject(
                number, "the algorithm does not keep groups like it (equal rewards, say)"
            )

    def state(self) -> dict[str, Any]:
        """Return the position in the prompts and the unfinished ones, as plain JSON."""
        return {"prompts": self.prompts.state(), "unfinished": sorted(self.unfinished.items())}

    def restore(self, state: Mapping[str, Any], *, reset_data: bool = False) -> None:
        """Go on from ``state``, and start unfinished prompts again with the same seeds.

        With ``reset_data`` all prompts come from the start of the data, also in place
        of the unfinished ones.
        """
        if reset_data:
            self.unfinished = {number: self.prompts.next() for number, _ in state["unfinished"]}
        else:
            self.prompts.restore(state["prompts"])
            self.unfinished = dict(state["unfinished"])

    def metrics(self) -> Metrics:
        """Return metrics of everything sampled since the last call, rejected groups
        included, and of how requests were shared among replicas.
        """
        # sorted, so that rounding does not depend on the order of arrival
        merged = merge(self.seen[number] for number in sorted(self.seen))
        self.seen = {}
        return merged | self.scorer.rollouts.router.metrics()


def pack(
    scored: list[ScoredCompletion], group: int, samples_per_prompt: int, temperature: float
) -> Batch:
    """Make one Batch of a prompt's completions.

    Raises:
        WeightSyncError: a log-prob is not finite.
    """
    trajectories = [one.trajectory() for one in scored]
    lengths = [len(trajectory) for trajectory in trajectories]
    columns = columns_of(trajectories)
    if not np.isfinite(columns["rollout_logprobs"]).all():
        raise WeightSyncError(
            "a rollout sampled tokens whose log-prob is not finite, of weights version "
            f"{columns['version'].max()}.\n"
            "  look at:  the weights, which may hold a NaN; rollout.dtype; sync/probe in "
            "metrics.jsonl"
        )

    size = len(scored)
    numbers = group * samples_per_prompt + np.arange(size, dtype=np.int64)
    return Batch(
        lengths=np.array(lengths, np.int64),
        tokens={
            **columns,
            **_routes(scored, lengths),
            **_masks(scored, columns["loss_mask"]),
        },
        seqs={
            "reward": np.array([one.reward for one in scored], np.float32),
            "temperature": np.full(size, temperature, np.float32),
            "group": np.full(size, group, np.int64),
            "trajectory": numbers,
            "unit": numbers,
            "truncated": np.array([one.completion.finish == "length" for one in scored]),
            "replica": np.array([one.completion.replica for one in scored], np.int32),
        },
    )


def _routes(scored: list[ScoredCompletion], lengths: list[int]) -> dict[str, np.ndarray]:
    """Return the column ``routed_experts``, if the rollout was asked for it.

    Raises:
        CouplerError: routes are of another number of tokens, or lack a token that was
            fed.
    """
    found = [one.completion.routed_experts for one in scored]
    routes = [of_one for of_one in found if of_one is not None]
    if not routes:
        return {}

    for of_one, length in zip(routes, lengths, strict=True):
        if len(of_one) != length:
            raise CouplerError(
                f"a rollout returned the experts of {len(of_one)} tokens for a prompt and "
                f"completion of {length}.\n"
                "  look at:  Completion.routed_experts; a token that was never fed has a row of -1"
            )
        if unknown := int((of_one[:-1] < 0).any(axis=(1, 2)).sum()):
            raise CouplerError(
                f"a rollout left out the experts of {unknown} of the {length - 1} tokens that "
                "it was fed.\n"
                "  look at:  Completion.routed_experts; only the last token, which nothing "
                "was sampled after, may have -1\n"
                "  try:      router_replay=R2, which does not ask it"
            )
    return {ROUTED_EXPERTS: np.concatenate(routes)}


def _masks(scored: list[ScoredCompletion], sampled: np.ndarray) -> dict[str, np.ndarray]:
    """Return the column ``sampling_mask``, if the rollout was asked for it.

    Args:
        sampled: [T] True at sampled tokens. Rows of the others are -1.
    """
    masks = [one.completion.sampling_mask for one in scored]
    if masks[0] is None:
        return {}
    kept = concat(masks)
    column = np.full((len(sampled), kept.shape[1]), -1, np.int32)
    column[sampled] = kept
    return {SAMPLING_MASK: column}


def _describe(scored: list[ScoredCompletion], group: Batch, kept: bool) -> Metrics:
    rewards = group["reward"]
    size = len(scored)
    lengths = [len(one.completion.tokens) for one in scored]

    return {
        "sampled/tokens": Metric(sum(lengths), how="sum"),
        "sampled/completion_tokens": Metric(sum(lengths), size),
        "sampled/truncated": Metric(float(group["truncated"].sum()), size),
        "sampled/reward": Metric(float(rewards.sum()), size),
        "sampled/equal_reward_groups": Metric(float(rewards.max() == rewards.min()), 1),
        "sampled/rejected_groups": Metric(float(not kept), how="sum"),
    }
