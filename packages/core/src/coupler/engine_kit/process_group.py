"""Join the process group of an engine's ranks, and leave it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coupler.engine_kit.rendezvous import keep_gloo_local, store_of
from coupler.errors import CouplerError, TooFewDevices
from coupler.interfaces import Rank
from coupler.system.log import get_logger

log = get_logger(__name__)

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# Destroying a healthy group takes milliseconds. One whose collective hangs is aborted.
LEAVE_S = 5.0


def device_of(rank: Rank) -> torch.device:
    """Return the first of the rank's devices, and make it the current one.

    A rank without devices gets a visible GPU by its index, or the CPU where there is
    none.
    """
    import torch

    count = torch.cuda.device_count()
    if not count:
        return torch.device("cpu")
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    index = next(
        (i for i, uuid in enumerate(uuids) if rank.devices and uuid in rank.devices[0]),
        rank.index % count,
    )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@dataclass(eq=False)
class _Group:
    """A process group that :func:`join` made, and the count of engines of this process
    in it.
    """

    made: ProcessGroup
    members: int = 0


_lock = threading.Lock()
_groups: list[_Group] = []  # at most one; a process has one default group


class Membership:
    """The share of one engine in the process group of its process. The last one to
    leave destroys the group.

    A group that :func:`join` found instead of making it, such as a rollout's, stays.
    """

    def __init__(self, group: _Group | None) -> None:
        self._group = group

    def leave(self, before: Callable[[], None] | None = None) -> None:
        """Leave the group. A second call does nothing, and a group that hangs is left
        behind.

        Args:
            before: is called before the last one destroys the group, to let go of what
                is built upon it.
        """
        import torch.distributed as dist

        with _lock:
            group, self._group = self._group, None
            if group is None:
                return
            group.members -= 1
            if group.members or not _is_current(group):
                return
            _groups.remove(group)
            if before is not None:
                before()
            if not _ends_in_time(dist.destroy_process_group) and not _ends_in_time(_abort):
                log.warning("the engine's process group did not end; it is left behind.")


def join(rank: Rank, device: torch.device) -> Membership:
    """Join the process group of ``rank``, or the one that this process is in already.

    So several engines share one process; :func:`require_same_ranks` says if they can.

    Raises:
        TooFewDevices: two ranks share a GPU.
    """
    import torch.distributed as dist

    with _lock:
        if not dist.is_initialized():
            # a GPU's group has gloo as well, for tensors that are on the host
            keep_gloo_local(rank.rendezvous.rpartition(":")[0] or rank.node)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            store = store_of(rank) if rank.world > 1 else dist.HashStore()
            dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.world)
            assert dist.group.WORLD is not None
            _groups[:] = [_Group(dist.group.WORLD)]
            _refuse_shared_devices(rank, device)

        group = next(filter(_is_current, _groups), None)
        if group is not None:
            group.members += 1
        return Membership(group)


def _is_current(group: _Group) -> bool:
    """Tell if nobody else has destroyed the group since it was made."""
    import torch.distributed as dist

    return dist.is_initialized() and dist.group.WORLD is group.made


def require_same_ranks(rank: Rank) -> None:
    """Refuse a process group that has other ranks than the engine.

    Raises:
        CouplerError: it has.
    """
    import torch.distributed as dist

    if (dist.get_world_size(), dist.get_rank()) != (rank.world, rank.index):
        raise CouplerError(
            f"engine rank {rank.index} of {rank.world} runs in a process that is already rank "
            f"{dist.get_rank()} of {dist.get_world_size()}.\n"
            "  start it in a process of its own"
        )


def _refuse_shared_devices(rank: Rank, device: torch.device) -> None:
    """Refuse ranks that share a GPU: NCCL would do it late and unclearly."""
    if device.type == "cpu" or rank.world == 1 or "NCCL_HOSTID" in os.environ:
        return
    import torch
    import torch.distributed as dist

    mine = torch.tensor(list(str(torch.cuda.get_device_properties(device).uuid).encode()))
    uuids = [torch.empty_like(mine) for _ in range(rank.world)]
    dist.all_gather(uuids, mine)
    found = len({tuple(uuid.tolist()) for uuid in uuids})
    if found < rank.world:
        raise TooFewDevices(
            f"an engine of {rank.world} ranks needs {rank.world} GPUs, one for each; it has "
            f"{found}.\n"
            "  try:  fewer ranks, or more GPUs in CUDA_VISIBLE_DEVICES"
        )


def _abort() -> None:
    """End a group whose collective never will."""
    import torch.distributed as dist

    dist.distributed_c10d._abort_process_group()


def _ends_in_time(function: Callable[[], None]) -> bool:
    """Call a function in a thread that may hang. Tell if it returned, or raised, within
    ``LEAVE_S``.
    """
    ending = threading.Thread(
        target=_quietly, args=(function,), name=function.__name__, daemon=True
    )
    ending.start()
    ending.join(LEAVE_S)
    return not ending.is_alive()


def _quietly(function: Callable[[], None]) -> None:
    """Call a function. A group that a peer's death broke may raise, and nothing is left
    to end.
    """
    try:
        function()
    except Exception as error:  # torch raises whatever its backend does
        log.warning(f"{function.__name__} of the engine's process group: {error}")
