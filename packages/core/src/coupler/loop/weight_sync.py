"""Sync weights from an engine to its rollouts as streams of whole tensors, with
receipts and a start-up proof.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

from coupler.config.schema import SyncConfig
from coupler.errors import ReplicaDied, WaitTimeout, WeightSyncError
from coupler.interfaces import (
    LORA,
    SendReceipt,
    ShardingManager,
    SyncReceipt,
    WeightUpdate,
)
from coupler.loop.rollout_group import MAX_RESTARTS
from coupler.loop.sync_probe import PROBE_TOKENS, Compared, SyncProbe, largest
from coupler.loop.transfer import GRACE_S, both_sides, verify
from coupler.metrics import Metric, Metrics, merge
from coupler.system.log import get_logger
from coupler.worker.train_infer import OF_REPLICA

log = get_logger(__name__)

# Largest mean |log-prob difference| in nats, by the bits of the least precise dtype.
# Measured: 1e-5 in fp32, 0.01 to 0.04 in bf16, 0.03 to 0.07 in fp8.
LIMIT = {"8": 0.5, "16": 0.15, "": 5e-3}


@dataclass(frozen=True, slots=True)
class Stream:
    """Tensors that travel together, either the weights or an adapter.

    With ``permuted`` they are altered for the proof.
    """

    adapter: bool = False
    permuted: bool = False


# the receipts of one stream: the sender's, and every replica's
Pushed = tuple[SendReceipt, list[SyncReceipt]]
WEIGHTS, ADAPTER = Stream(), Stream(adapter=True)
# the altered pushes of the proof, by weight format and by the metric of their probe
ALTERED: dict[str, dict[str, tuple[Stream, ...]]] = {
    "full": {"sync/probe_permuted": (Stream(permuted=True),)},
    # The adapter that training starts from is 0, so a rollout that ignores adapters
    # would look right with it. The proof sends a random one.
    LORA: {
        "sync/probe_permuted": (Stream(permuted=True),),
        "sync/probe_adapter": (WEIGHTS, Stream(adapter=True, permuted=True)),
    },
}


class StreamShardingManager(ShardingManager):
    """Pushes tensors of the engine through a transport into every rollout worker.

    A sync pauses the rollouts, streams, checks the receipts of all replicas, and
    resumes. Rollouts start from dummy weights. :meth:`prove` pushes altered copies and
    then the true weights, and compares log-probs after each. This finds a tensor that
    is not reached, a push that changes nothing and a cache that survives, all before
    the first step.

    In format ``lora`` a sync sends the adapter. The weights beneath it go first where a
    replica does not hold them: at the start, after it died, and after they slept.

    Both sides take turns on devices that they share, through ``residency``. Weights
    move while the cache is away, and tokens to compare are sampled while the engine is
    away.
    """

    def __init__(self, config: SyncConfig, **edge: Any) -> None:
        super().__init__(config, **edge)
        self.temperature = self.temperature or 1.0
        self.synced = ADAPTER if self.weight_format == LORA else WEIGHTS
        self.limit = config.max_mean_logprob_diff
        self.comparison = SyncProbe(
            self.engine, self.rollouts, self.residency, self.probe_prompt, self.temperature
        )

    async def prove(self, version: int = 0) -> Metrics:
        """Push the streams of :data:`ALTERED`, then the true weights as ``version``,
        and compare log-probs after each.

        Raises:
            WeightSyncError: the true weights are not what a rollout runs, or altered
                ones changed nothing.
        """
        if not self.config.self_test:
            return await self._sync("prove", version)
        altered: dict[str, list[Compared]] = {}
        for name, streams in ALTERED.get(self.weight_format, ALTERED["full"]).items():
            await self._push("prove", version, *streams)
            altered[name] = await self.comparison.replicas()

        metrics = await self._sync("prove", version)
        true = await self.comparison.replicas()
        await self._prove_true(true, altered["sync/probe_permuted"])
        for name, compared in altered.items():
            self._prove_altered(name, compared, true)

        return {
            **metrics,
            "sync/probe": Metric(largest(true)),
            **{name: Metric(largest(compared)) for name, compared in altered.items()},
        }

    async def _prove_true(self, true: list[Compared], altered: list[Compared]) -> None:
        """Refuse replicas that differ from the engine under the true weights."""
        for replica, one in enumerate(true):
            if one.difference <= self.limit:  # NaN is above every limit
                continue
            # A replica that died in between answers for none of the others.
            before = altered[replica] if len(altered) == len(true) else None
            cause = await self.comparison.cause(one, before, self.limit)

            raise WeightSyncError(
                f"after a full weight push the log-probs of the rollout{self._which(replica)} "
                f"differ from the engine's by {one.difference:.4f} on average, limit "
                f"{self.limit:.4f}.\n"
                f"  this means:  {cause}\n"
                "  look at:  temperature, dtype, tied or fused weights; the limit is "
                "sync.max_mean_logprob_diff"
            )

    def _prove_altered(self, name: str, altered: list[Compared], true: list[Compared]) -> None:
        """Refuse replicas on which altered weights changed nothing."""
        sent = "a random adapter" if name == "sync/probe_adapter" else "permuted weights"

        for replica, one in enumerate(altered):
            own = true[replica] if len(true) == len(altered) else max(true, key=_difference)
            allowed = max(self.limit, 10 * own.difference)
            if one.difference > allowed:
                continue
            if one.spread <= allowed:
                log.warning(
                    f"a push of {sent} changed no log-prob of the rollout{self._which(replica)}, "
                    "and the model is so sure of every token, or of none, that this proof cannot "
                    "tell whether the rollout runs the weights it is sent"
                )
                continue
            raise WeightSyncError(
                f"a push of {sent} left the rollout's log-probs within {one.difference:.6f} of the "
                f"engine's{self._which(replica)} (with the true weights: {own.difference:.6f}).\n"
                "  this means:  the rollout does not run the weights it is sent, or the transport "
                "brings others; this proof cannot tell which"
            )

    def _which(self, replica: int) -> str:
        return f" of replica {replica}" if len(self.rollouts.replicas) > 1 else ""

    async def sync(self, version: int) -> Metrics:
        return await self._sync("sync", version)

    async def _sync(self, phase: str, version: int) -> Metrics:
        start = time.perf_counter()
        pushed = await self._push(phase, version, self.synced)
        self.version = version
        sent = [sent for sent, _ in pushed]
        if not self.limit:
            dtypes = [one.dtype for sent, receipts in pushed for one in (sent, *receipts)]
            self.limit = next(LIMIT[bits] for bits in LIMIT if any(bits in d for d in dtypes))

        return {
            "time/sync": Metric(time.perf_counter() - start, how="sum"),
            "sync/bytes": Metric(sum(one.num_bytes for one in sent), how="sum"),
            "sync/tensors": Metric(sum(one.num_tensors for one in sent), how="sum"),
            "time/sync_send": Metric(sum(one.seconds for one in sent), how="sum"),
            **{
                f"time/sync_{name}": Metric(seconds, how="sum")
                for name, seconds in _slowest(pushed).items()
            },
        }

    def check(self, metrics: Metrics) -> bool:
        """Judge the last sync by the tokens that were sampled after it.

        Returns:
            True if it was judged. If the batch is older than the last sync, or the
            trainer's log-probs are not finite, :meth:`probe` has to judge the next one.

        Raises:
            WeightSyncError: the mean difference is above the limit, over all tokens or
                over those of one replica.
        """
        diff = metrics.get("train_infer/abs_diff")
        if diff is None:
            return True
        if not diff.weight or not isfinite(diff.value):
            return False

        self._judge(diff.value, "the rollouts'")
        for name, metric in metrics.items():
            if name.startswith(OF_REPLICA) and metric.weight >= PROBE_TOKENS:
                self._judge(metric.value, f"rollout replica {name.removeprefix(OF_REPLICA)}'s")
        return True

    async def probe(self) -> Metrics:
        """Judge the last sync by tokens sampled for that alone.

        Their ``train_infer/*`` stand for those of a batch.

        Raises:
            WeightSyncError: the mean difference is above the limit.
        """
        compared = await self.comparison.replicas()
        diff = largest(compared)
        self._judge(diff, "a rollout replica's")
        return {"sync/probe": Metric(diff), **merge(one.metrics for one in compared)}

    def _judge(self, diff: float, whose: str) -> None:
        if not diff <= self.limit:
            raise WeightSyncError(
                f"{whose} log-probs differ from the engine's by {diff:.4f} on average at "
                f"version {self.version}, limit {self.limit:.4f}.\n"
                "  this means:  a sync or its transport did not bring the engine's weights into "
                "the rollout, or one side computes other log-probs in a run than in the proof at "
                "its start; these numbers cannot tell which\n"
                "  look at:  sync/* and train_infer/abs_diff in metrics.jsonl; the limit is "
                "sync.max_mean_logprob_diff"
            )

    def _update(self, version: int, stream: Stream, attempt: int) -> WeightUpdate:
        return self.weight_update(
            version, permuted=stream.permuted, attempt=attempt, adapter=stream.adapter
        )

    async def _push(self, phase: str, version: int, *streams: Stream) -> list[Pushed]:
        """Push to all replicas. If one is dead or dies, start it again and push to all
        of them again.

        Raises:
            ReplicaDied: a replica died more often than it may be started.
            WeightSyncError: a replica did not load everything.
        """
        for attempt in range(1 + MAX_RESTARTS * len(self.rollouts.replicas)):
            await self.rollouts.pause(self.in_flight)
            if self.rollouts.dead:
                async with self.residency.generating("start_rollout"):
                    await self.rollouts.revive(self.in_flight)

            # the next attempt starts a replica that dies here again
            async with self.residency.syncing(phase):
                with suppress(ReplicaDied):
                    pushed = [
                        await self._transfer(self._update(version, stream, attempt))
                        for stream in await self._needed(streams)
                    ]
                    await self.rollouts.resume()
                    return pushed

        raise AssertionError("a replica was started more often than revive() allows")

    async def _needed(self, streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
        """Put the weights ahead of an adapter if a replica does not hold them."""
        if not streams[0].adapter or await self.rollouts.holds_base():
            return streams
        return WEIGHTS, *streams

    async def _transfer(self, update: WeightUpdate) -> Pushed:
        """Run both sides of one stream.

        Raises:
            WaitTimeout: neither side ended. Their own deadlines are sooner and say
                more.
        """
        try:
            async with asyncio.timeout(self.config.deadline_s + 2 * GRACE_S):
                sent, receipts = await both_sides(
                    self.engine.push(update), self.rollouts.update(update)
                )
        except TimeoutError:
            raise WaitTimeout(
                f"weights version {update.version} were not in every rollout after "
                f"{self.config.deadline_s:.0f} s.\n"
                "  look at:  the rollouts' logs; the limit is sync.deadline_s"
            ) from None

        for replica, receipt in enumerate(receipts):
            verify(sent[0], receipt, replica)
        return sent[0], receipts


def _difference(one: Compared) -> float:
    return one.difference


def _slowest(pushed: list[Pushed]) -> dict[str, float]:
    """Return the seconds of the slowest replica by phase, over all streams."""
    total: dict[str, float] = {}
    for _, receipts in pushed:
        for name in {name for receipt in receipts for name in receipt.seconds}:
            slowest = max(receipt.seconds.get(name, 0.0) for receipt in receipts)
            total[name] = total.get(name, 0.0) + slowest
    return total
