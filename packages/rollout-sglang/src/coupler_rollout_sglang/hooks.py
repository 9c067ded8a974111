"""Change what SGLang does, by its own plugin system, in the processes that we start.

SGLang calls :func:`install` in every process of every engine in an environment that has
this package. In an engine that somebody else started, it does nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from coupler.engine_kit.inference.gate import opens

VARIABLE = "COUPLER_SGLANG"
"""The environment variable that an engine's processes inherit from the one that starts
them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Hold what the rollout's options ask of every process of the engine."""

    per_request_seeds: bool = True
    quantization: str = ""
    routed_experts: bool = False
    gate: str = ""
    """Path of the gate at which schedulers wait before they take a device."""

    def announce(self) -> None:
        """Write it down for the processes that this one starts."""
        os.environ[VARIABLE] = json.dumps(asdict(self))

    @staticmethod
    def read() -> Wanted | None:
        """Return what was announced, or None in an engine of somebody else."""
        text = os.environ.get(VARIABLE)
        return Wanted(**json.loads(text)) if text else None


def install() -> None:
    """Register our sampler and hooks."""
    wanted = Wanted.read()
    if wanted is None:
        return
    from coupler_rollout_sglang.compat import worker as sglang
    from coupler_rollout_sglang.worker import quantized, receiver

    sglang.register_sampler()
    sglang.hook_stop_tokens(no_stop_tokens)
    sglang.hook_payload(only_ours)
    sglang.hook_answer(receiver.answered)
    sglang.hook_facts(receiver.facts)
    sglang.hook_adapters(empty_adapter)
    if wanted.gate:
        sglang.hook_worker(partial(wait_at, wanted.gate))
    if wanted.per_request_seeds:
        sglang.hook_seeds(with_seeds)
    if wanted.routed_experts:
        sglang.hook_routes(kept_apart)
    if wanted.quantization:
        sglang.hook_quantization(quantized.quantise_once)
        sglang.hook_cache_scales(quantized.without_scales)


def wait_at(gate: str, original: Any, *args: Any, **options: Any) -> None:
    """Make a worker once the gate is open, or end with nobody to work for."""
    if not opens(gate):
        os._exit(1)
    original(*args, **options)


def no_stop_tokens(_original: Any, _config: Any) -> set[int]:
    """Take the tokens out that end a completion by the model's folder."""
    return set()


def only_ours(_original: Any, data: Any) -> Any:
    """Read a payload of weights as our own message, and never as a pickle.

    Raises:
        ValueError: it is something else.
    """
    from coupler_rollout_sglang.worker.receiver import read_payload

    return read_payload(data)


def empty_adapter(_original: Any, manager: Any, ref: Any) -> None:
    """Start with an adapter that has a rank and no tensors: these come by updates."""
    manager.load_lora_weights_from_tensors(ref, {})


def with_seeds(result: Any, _class: Any, batch: Any, *_: Any, **__: Any) -> Any:
    """Keep the seeds of a batch, which SGLang drops unless its kernels are
    deterministic.
    """
    import torch

    if result.sampling_seed is None:
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        result.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device)
    return result


def kept_apart(result: Any, capturer: Any, *_: Any, **__: Any) -> Any:
    """Keep the routes of a batch apart from where the next batch writes its own.

    SGLang computes the next batch while it copies them to the host, and 0.5.17 copies
    them from there.
    """
    if result is not None and _shares(result.topk, capturer.device_cache.buffer):
        result.topk = result.topk.clone()
    return result


def _shares(one: Any, other: Any) -> bool:
    """Tell if two tensors lie in the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
