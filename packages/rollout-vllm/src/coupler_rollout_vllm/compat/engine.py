"""Start an engine and speak to it, in the rollout's process."""
# pyright: reportMissingImports=false
# The environment that is type-checked has no vLLM: its torch may be another.

from __future__ import annotations

import asyncio
import os
import time
from copy import copy
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args

from coupler.engine_kit import derive
from coupler.errors import CouplerError
from coupler.interfaces import Request
from coupler_rollout_vllm.compat import ADAPTER
from coupler_rollout_vllm.compat.version import installed

if TYPE_CHECKING:
    import numpy as np

# vLLM would look here for an adapter that its workers do not hold.
NOWHERE = "/adapters-come-by-updates"


# Our name of a precision, and those that releases of vLLM have for it. The first known
# one is taken. It has a scale for each row of a weight, where "fp8" has one for all.
QUANTIZATIONS = {"fp8": ("fp8_per_channel", "fp8")}


def quantization(name: str) -> str:
    """Return vLLM's name for weights that are quantised while they are loaded."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    return next(known for known in QUANTIZATIONS[name] if known in QUANTIZATION_METHODS)


def import_engine() -> None:
    """Import what :func:`start` needs."""
    import_module("vllm.v1.engine.async_llm")


def start(arguments: dict[str, Any]) -> Any:
    """Start an engine, whose scheduler and model workers get processes of their own.

    Call :func:`~coupler_rollout_vllm.compat.version.prepare_process` first.

    Raises:
        MemoryError: the device has too little memory for it.
        CouplerError: it did not start.
    """
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # Otherwise Triton's products, those of attention among them, round to 10 bits on a
    # GPU.
    if arguments["dtype"] == "float32":
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    try:
        # This context has the defaults of vLLM's offline generate: batches for
        # throughput.
        context = UsageContext.LLM_CLASS
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=context)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"vLLM {installed()[1]} did not start: {str(error).splitlines()[0]}"
        if "memory" in text.lower():
            raise MemoryError(text) from error
        raise CouplerError(
            f"{text}\n  look at:  its own lines above; too little free memory "
            "(rollout.gpu_memory_gib) is usual"
        ) from error


def engine_dead() -> type[Exception]:
    """Return the class of vLLM's error for an engine whose process ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError


def device_bytes() -> int:
    """Return the memory of the first visible GPU.

    No CUDA context is made in this process.
    """
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory(0))


def stop(engine: Any) -> None:
    """End the engine's processes."""
    engine.shutdown()

    # The destructor calls it again, maybe when the interpreter's modules are gone.
    engine.shutdown = lambda: None


def sampling_params(
    request: Request, done: int, room: int, seeded: bool, num_logprobs: int = 0
) -> Any:
    """Return vLLM's parameters for a request, from its token ``done`` on.

    The highest ``num_logprobs`` come beside that of the token. Each continuation of a
    request draws from a stream of random numbers of its own.
    """
    params = copy(
        _checked(request.temperature, request.stop, request.top_p, request.top_k, num_logprobs)
    )
    params.max_tokens = room - done
    if seeded:
        seed = derive(request.seed, "continued", done) if done else request.seed
        params.seed = seed % 2**63
    return params


@lru_cache
def _checked(
    temperature: float, stop: tuple[int, ...], top_p: float, top_k: int, num_logprobs: int
) -> Any:
    """Make the parameters that requests share once, since vLLM checks each field."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=list(stop),
        ignore_eos=True,
        logprobs=num_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def logprobs_of(output: Any) -> list[float]:
    """Return the log-probs of the sampled tokens in one output of the scheduler,
    [tokens].

    Raises:
        CouplerError: there are more log-probs than tokens, or fewer.
    """
    found = output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs is not None else []
    if len(found) != len(output.new_token_ids):
        raise CouplerError(
            f"vLLM returned {len(found)} log-probs of {len(output.new_token_ids)} tokens.\n"
            "  look at:  rollout.extra_args; speculative decoding and others change what it returns"
        )
    return found


def kept_of(output: Any) -> np.ndarray:
    """Return the ids that each token in one output of the scheduler was sampled among,
    [tokens, kept], as far as log-probs of them were asked for.
    """
    return output.new_logprobs.logprob_token_ids[:, 1:]


async def freeze(engine: Any) -> None:
    """Stop between two tokens, with every cache kept.

    Return when all tokens that were sampled before have arrived.
    """
    await engine.pause_generation(mode="keep", clear_cache=False)
    while engine.engine_core.outputs_queue.qsize():
        await asyncio.sleep(0)


def hand_over_outputs(engine: Any, task: asyncio.Task[None]) -> None:
    """Let ``task`` take the scheduler's outputs, in place of vLLM's own task."""
    if engine.output_handler is not None:
        engine.output_handler.cancel()
    engine.output_handler = task


async def next_outputs(engine: Any) -> list[Any]:
    """Wait for the scheduler's next outputs.

    Raises:
        EngineDeadError: its process ended; see :func:`engine_dead`.
    """
    return (await engine.engine_core.get_output_async()).outputs


async def send_request(
    engine: Any, name: str, tokens: list[int], params: Any, salt: str, *, adapted: bool
) -> None:
    """Give the scheduler a request whose parameters need no further check.

    With ``adapted``, the request runs with the engine's adapter.
    """
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest

    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=LoRARequest("policy", ADAPTER, NOWHERE) if adapted else None,
        cache_salt=salt,
        data_parallel_rank=None,
    )
    await engine.engine_core.add_request_async(request)


async def send_abort(engine: Any, names: list[str]) -> None:
    """Let the scheduler forget these requests."""
    await engine.engine_core.abort_requests_async(names)


def adapter_size(rank: int) -> int:
    """Return the smallest rank of vLLM's list that has room for ``rank``."""
    from vllm.config.lora import MaxLoRARanks

    return min(size for size in get_args(MaxLoRARanks) if size >= rank)
