"""A rollout that takes its time, and dies on demand; test_replicas.py has it built in
actors.
"""

from __future__ import annotations

import asyncio
import os
import signal

from coupler.interfaces import Completion, Request, SyncReceipt, WeightUpdate
from coupler.testing.toy import ToyRollout


class SlowRollout(ToyRollout):
    mortal = False

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0.1 * (1 + request.seed))
        return await super().generate(request)

    async def die_in_update(self) -> None:
        self.mortal = True

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        if self.mortal:
            os.kill(os.getpid(), signal.SIGKILL)
        return await asyncio.to_thread(asyncio.run, super().update(update))
