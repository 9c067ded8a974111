"""Wait for both sides of a weight transfer, and compare their receipts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from coupler.errors import PeerLost, ReplicaDied, WeightSyncError
from coupler.interfaces import (
    SendReceipt,
    SyncReceipt,
)
from coupler.system.shapes import check_receipt

# After one side of a transfer failed, the other one gets this long to report the cause.
GRACE_S = 5.0


async def both_sides(sending: Awaitable[Any], receiving: Awaitable[Any]) -> tuple[Any, Any]:
    """Wait for both sides of a transfer.

    If both fail, the error that only reports the other side's end is not raised.
    """
    tasks = [asyncio.ensure_future(sending), asyncio.ensure_future(receiving)]

    try:
        ended, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if rest:
            died = any(isinstance(task.exception(), ReplicaDied) for task in ended)
            # A dead replica's transfer is tried again, so this one has to end first.
            await asyncio.wait(rest, timeout=None if died else GRACE_S)

        failed = [error for task in tasks if task.done() and (error := task.exception())]
        if failed:
            raise next((error for error in failed if not isinstance(error, PeerLost)), failed[0])
        return tasks[0].result(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()


def verify(sent: SendReceipt, receipt: SyncReceipt, replica: int) -> None:
    """Check that a replica loaded everything that was sent.

    Raises:
        WeightSyncError: the version differs, a tensor did not arrive, or a name has no
            counterpart.
    """
    check_receipt(receipt, SyncReceipt, f"rollout replica {replica}")
    problems = []
    if receipt.version != sent.version:
        problems.append(f"it reports version {receipt.version}, sent was {sent.version}")
    if receipt.num_received != sent.num_tensors:
        problems.append(
            f"{receipt.num_received} of {sent.num_tensors} tensors arrived: the transport or the "
            "rollout lost some, or counts wrong"
        )
    if receipt.missing:
        problems.append(
            f"{len(receipt.missing)} of its parameters got nothing, first: {receipt.missing[0]}. "
            "The engine did not send it, or the rollout did not load it"
        )
    if receipt.unexpected:
        problems.append(
            f"{len(receipt.unexpected)} tensors match no parameter, first: "
            f"{receipt.unexpected[0]}. The engine must not send it, or the rollout take it"
        )
    if not problems and receipt.num_loaded != receipt.num_received:
        problems.append(
            f"{receipt.num_loaded} of {receipt.num_received} received tensors were loaded"
        )

    if problems:
        raise WeightSyncError(
            f"rollout replica {replica} did not take weights version {sent.version}: "
            f"{'; '.join(problems)}.\n"
            "  nothing was sampled from it"
        )
