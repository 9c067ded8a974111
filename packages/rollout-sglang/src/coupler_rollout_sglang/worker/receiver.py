"""Receive and load weights inside a model worker, and say what became of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from coupler.engine_kit.inference.checksums import of_plan
from coupler.engine_kit.inference.loading import (
    Plan,
    copy,
    least_precise,
    plans,
    record,
    shapes_of,
)
from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Rank, WeightUpdate
from coupler_rollout_sglang import messages
from coupler_rollout_sglang.compat import worker as sglang
from coupler_rollout_sglang.worker import quantized, state
from coupler_rollout_sglang.worker.adapters import forget_adapter, load_adapter


def read_payload(data: bytes | str) -> list[tuple[str, torch.Tensor]]:
    """Return our message as the name of an empty tensor: SGLang hands on tensors."""
    return [(messages.text_of(data), torch.empty(0))]


def receive(model: torch.nn.Module, named: list[tuple[str, torch.Tensor]]) -> None:
    """Receive what the message announces, and load it into the model.

    SGLang's ``custom_weight_loader`` names this function. An error in it would end the
    process, so that it becomes the answer.
    """
    (text, _), *_ = named
    update, (index, world) = messages.update_of(text), sglang.rank()
    answer: dict[str, Any]

    try:
        if update is None:
            answer = {"checksums": of_plan(plans.get(model, {}))}
        else:
            answer = load(model, update, Rank(index=index, world=world, devices=device()))
    except CouplerError as error:
        answer = {"error": [type(error).__name__, str(error)]}
    except torch.OutOfMemoryError as error:
        answer = {"error": ["MemoryError", str(error)]}
    except Exception as error:
        answer = {"error": ["WeightSyncError", f"{type(error).__name__}: {error}"]}
    state.answers = json.dumps(sglang.gather(answer))


def load(
    model: torch.nn.Module,
    update: WeightUpdate,
    place: Rank,
) -> dict[str, Any]:
    """Load an update, of an adapter or of the weights."""
    start = time.perf_counter()
    # SGLang computes on a stream of its own, and may be a batch ahead.
    synchronize()

    with torch.no_grad():
        if update.adapter:
            account = load_adapter(
                plan_beneath(model),
                update.receive(place),
            )
        else:
            forget_adapter()
            account = load_weights(model, update, place)

    synchronize()
    state.version = update.version
    seconds = {"load": time.perf_counter() - start}
    return {**account, "seconds": seconds, "dtype": least_precise(model)}


def plan_beneath(model: torch.nn.Module) -> Plan:
    """Return how the weights beneath an adapter were copied.

    Raises:
        WeightSyncError: the model computes further weights from them.
    """
    if model not in plans:
        raise WeightSyncError(
            "SGLang computes further weights of this model, so that an adapter cannot come apart."
            "\n  set:  rollout.max_lora_rank=0: every sync then brings the sum"
        )
    return plans[model]


def load_weights(
    model: torch.nn.Module,
    update: WeightUpdate,
    place: Rank,
) -> dict[str, Any]:
    """Load weights into the model.

    Where copies alone fill the model, they are the plan for later updates. Models that
    compute further weights after they were loaded, and layers that are quantised, go
    through their loader each time.
    """
    folder = Path(sglang.folder())
    weights = update.receive(
        place,
        shapes_of(model, folder),
    )

    if plans.get(model) is not None and not state.same_parameters(model):
        del plans[model]
    if quantized.layers:
        return quantized.load(model, weights, folder)
    if model in plans:
        return copy(plans[model], weights)

    account = record(model, weights, folder)
    state.remember_parameters(model)
    if sglang.computes_weights(model):
        plans.pop(model, None)
    return account


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def answered(original: Any, updater: Any, *args: Any, **named: Any) -> tuple[bool, str]:
    """Return the answers of all workers as the message of an update."""
    state.answers, state.manager = None, sglang.adapters_of(updater)
    success, message = original(updater, *args, **named)
    return success, state.answers or message


def facts(original: Any, worker: Any, request: Any) -> Any:
    """Return a row of each worker: its process, bytes that it holds and that are free
    on its device, tokens that its cache has room for, and layers with a router.
    """
    if request.name != messages.FACTS:
        return original(worker, request)
    held, free = 0, 0
    if torch.cuda.is_available():
        held, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    row = (os.getpid(), held, free, sglang.cache_tokens(worker), *sglang.routers_of(worker))
    return sglang.gather([float(number) for number in row])


def device() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return (str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid),)
