"""Write checkpoints that any layout of ranks can read.

They are whole tensors under checkpoint names, as safetensors and JSON. Every rank
writes its share, ``shard-00002-of-00004.safetensors``, and ``index.json`` says where
each tensor is. A name is that of a Hugging Face checkpoint behind the state it is:
``params/``, ``exp_avg/``, ``exp_avg_sq/``. :mod:`coupler.engine_kit.saved` reads them,
and those of other engines.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from coupler.engine_kit.saved import INDEX
from coupler.errors import WaitTimeout
from coupler.interfaces import Named


class Save:
    """A save under way.

    The caller's thread gathers the tensors and copies this rank's share to the host.
    Another thread writes it.
    """

    def __init__(self, path: Path, tensors: Iterable[Named], facts: dict[str, Any]) -> None:
        self._path, self._done = path, Future[None]()
        rank, world = dist.get_rank(), dist.get_world_size()
        files, share = {}, {}
        for position, (name, tensor) in enumerate(tensors):
            files[name] = _file(position % world, world)
            if position % world == rank:
                share[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

        index = {"tensors": files, **facts} if rank == 0 else None
        arguments = share, path / _file(rank, world), index
        threading.Thread(
            target=self._run, args=arguments, name=f"save {path.name}", daemon=True
        ).start()

    def wait(self, seconds: float) -> None:
        """Wait until every file is on disk.

        Raises:
            Exception: the disk is full, or refuses for another reason.
        """
        try:
            self._done.result(seconds)
        except TimeoutError:
            raise WaitTimeout(
                f"{self._path} was not on disk after {seconds:.0f} s.\n  look at:  the disk, "
                "checkpoint.deadline_s"
            ) from None

    def _run(self, share: dict[str, Tensor], file: Path, index: dict[str, Any] | None) -> None:
        """Write this rank's files. Then :meth:`wait` returns."""
        try:
            if share:
                save_file(share, file)
            if index:
                (file.parent / INDEX).write_text(json.dumps(index))
            self._done.set_result(None)
        # This is the thread's boundary: wait() raises the error.
        except Exception as error:
            self._done.set_exception(error)


def _file(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"
