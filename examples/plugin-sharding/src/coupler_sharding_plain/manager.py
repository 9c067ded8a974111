"""``sync.manager=plain``: pause, start the dead again, push, verify, resume."""

import asyncio
import time
from itertools import count

from coupler import Metric, ShardingManager
from coupler.errors import CouplerError, ReplicaDied, WeightSyncError


class PlainManager(ShardingManager):
    async def setup(self):
        if self.weight_format != "full":
            raise CouplerError(
                "sync.manager=plain moves whole weights only.\n  try:  sync.manager=stream"
            )
        await super().setup()

    async def sync(self, version):
        start = time.perf_counter()
        # revive() ends this: it raises where a replica died too often
        for attempt in count():
            await self.rollouts.pause(self.in_flight)
            if self.rollouts.dead:
                async with self.residency.generating("start_rollout"):
                    await self.rollouts.revive(self.in_flight)
            async with self.residency.syncing("sync"):
                try:
                    sent = await self._push(self.weight_update(version, attempt=attempt))
                    break
                except ReplicaDied:
                    continue
        await self.rollouts.resume()
        self.version = version
        return {
            "time/sync": Metric(time.perf_counter() - start, how="sum"),
            "sync/bytes": Metric(sent.num_bytes, how="sum"),
        }

    async def _push(self, update):
        pushing = asyncio.ensure_future(self.engine.push(update))
        try:
            receipts = await self.rollouts.update(update)
        # a transfer that failed has ended on both sides before the next one begins
        finally:
            await asyncio.wait([pushing], timeout=self.config.deadline_s)
        sent = (await pushing)[0]
        for replica, receipt in enumerate(receipts):
            complete = (
                receipt.version == sent.version and not receipt.missing and not receipt.unexpected
            )
            if not complete or {receipt.num_received, receipt.num_loaded} != {sent.num_tensors}:
                raise WeightSyncError(
                    f"replica {replica} did not load the {sent.num_tensors} tensors sent: "
                    f"{receipt}."
                )
        return sent
