"""Answer the rollout's calls inside vLLM's model workers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from coupler.engine_kit.inference import checksums
from coupler.engine_kit.inference.loading import least_precise, plans, shapes_of
from coupler.errors import CouplerError
from coupler.interfaces import Endpoint, Memory, Rank, WeightUpdate
from coupler_rollout_vllm.compat.memory import device_bytes_of
from coupler_rollout_vllm.compat.worker import folder_of, model_of, rank_of, routers_of
from coupler_rollout_vllm.worker import memory
from coupler_rollout_vllm.worker.adapters import forget_adapter, load_adapter
from coupler_rollout_vllm.worker.loading import load


def answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's error as ``{"error": [its class, its text]}``.

    vLLM would carry only the text of a raised error.
    """

    @wraps(method)
    def answered(*args: Any) -> Any:
        try:
            return method(*args)
        except CouplerError as error:
            return {"error": [type(error).__name__, str(error)]}
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            return {"error": ["MemoryError", str(error)]}

    return answered


class WorkerExtension:
    """Hold the methods that vLLM mixes into its worker.

    ``collective_rpc`` calls them by name, with plain arguments.
    """

    def coupler_facts(self) -> dict[str, Any]:
        """Return where this worker is, and which of its layers have a router."""
        routers = routers_of(self)
        return {
            "rank": rank_of(self)[0],
            "device": _device(),
            "pid": os.getpid(),
            "routers": routers,
        }

    @answering
    def coupler_update(self, text: str) -> dict[str, Any]:
        """Receive and load a :class:`~coupler.interfaces.WeightUpdate` in JSON."""
        fields = json.loads(text)
        update = WeightUpdate(
            **{**fields, "endpoints": tuple(Endpoint(**e) for e in fields["endpoints"])}
        )

        index, world = rank_of(self)
        start = time.perf_counter()
        place = Rank(index=index, world=world, devices=_device())

        if update.adapter:
            loaded = load_adapter(self, update.receive(place))
        else:
            forget_adapter(self)
            loaded = load(
                self, update.receive(place, shapes_of(model_of(self), Path(folder_of(self))))
            )
        seconds = {"load": time.perf_counter() - start}
        return {**loaded, "seconds": seconds, "dtype": least_precise(model_of(self))}

    def coupler_checksums(self) -> dict[str, int]:
        """Return the checksums of :func:`checksums.of_plan`.

        Layers that pack their weights have none.
        """
        return checksums.of_plan(plans.get(model_of(self), {}))

    @answering
    def coupler_sleep(self, what: Iterable[str]) -> int:
        """Give back the memory of these parts, and return how many bytes."""
        return memory.sleep(self, [Memory(part) for part in what])

    @answering
    def coupler_wake(self, what: Iterable[str]) -> int:
        """Take the memory back. Its contents are undefined."""
        return memory.wake(self, [Memory(part) for part in what])

    def coupler_device_bytes(self) -> int:
        """Return the device memory that this process holds now, without what sleeps."""
        return device_bytes_of(self)


def _device() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return (str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid),)
