"""Join the answers of model workers into one receipt, in the rollout's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coupler.interfaces import SyncReceipt


def join(version: int, answers: Sequence[dict[str, Any]]) -> SyncReceipt:
    """Return one receipt of a replica.

    With pipeline stages, a name that one worker has no parameter for may be another's,
    so only names that no worker takes are unexpected. A parameter without weights is
    missing on whichever worker it is.

    Args:
        answers: one per worker, with ``num_received``, ``num_bytes``, the names that
            were ``unused`` and ``missing``, ``seconds``, and perhaps ``dtype``.
    """
    unexpected = set.intersection(*(set(answer["unused"]) for answer in answers))
    num_received = min(answer["num_received"] for answer in answers)

    return SyncReceipt(
        version=version,
        num_received=num_received,
        num_loaded=num_received - len(unexpected),
        num_bytes=min(answer["num_bytes"] for answer in answers),
        missing=tuple(sorted({name for answer in answers for name in answer["missing"]})),
        unexpected=tuple(sorted(unexpected)),
        seconds={
            name: max(answer["seconds"][name] for answer in answers)
            for name in answers[0]["seconds"]
        },
        dtype=answers[0].get("dtype", ""),
    )
