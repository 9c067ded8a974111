"""Run Megatron-Core on the CPU, while :func:`cuda_as_cpu` is open.

Megatron-Core names the device "cuda", calls ``torch.cuda`` and has parts that only a
GPU's libraries fill. All of them get the CPU. Everything that this module changes is in
:func:`_replacements`. It changes nothing if there is a GPU, and puts everything back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from coupler.errors import CouplerError

TESTED = ("0.16",)
"""Versions of Megatron-Core whose requests for CUDA are known."""
CPU = torch.device("cpu")


def check_version() -> None:
    """Refuse a Megatron-Core that these replacements were not made for.

    Raises:
        CouplerError: its version is another one.
    """
    found = version("megatron-core")
    if ".".join(found.split(".")[:2]) not in TESTED:
        raise CouplerError(
            f"engine=megatron runs megatron-core {' or '.join(TESTED)} without a GPU, not "
            f"{found}.\n"
            f"  try:  pip install 'megatron-core=={TESTED[-1]}.*', or a GPU"
        )


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Give the CPU to code that asks for CUDA.

    This holds in this thread's torch functions and in all of ``torch.cuda``.
    """
    _STATE.enter()
    try:
        with _CudaToCpu(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _STATE.leave()


def replaced() -> dict[str, list[str]]:
    """Name the attributes that :func:`cuda_as_cpu` replaces, by their owners."""
    found: dict[str, list[str]] = {}
    for owner, attribute, _ in _replacements():
        found.setdefault(getattr(owner, "__name__", "") or owner.name, []).append(attribute)
    return found


class _Replaced:
    """Hold the replacements and the originals, for all threads together.

    The first entry puts the replacements in, and the last leave puts the originals
    back.
    """

    def __init__(self) -> None:
        self.lock, self.depth = threading.Lock(), 0
        self.originals: list[tuple[Any, str, Any]] = []

    def enter(self) -> None:
        with self.lock:
            self.depth += 1
            if self.depth > 1:
                return
            for owner, name, value in _replacements():
                self.originals.append((owner, name, owner.__dict__.get(name, _ABSENT)))
                setattr(owner, name, value)

    def leave(self) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth:
                return
            while self.originals:
                owner, name, value = self.originals.pop()
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


_ABSENT = object()
_STATE = _Replaced()


class _CudaToCpu(TorchFunctionMode):
    """Rewrite the device of every torch function that names CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False

        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        # The optimizer compares the type with "torch.cuda.FloatTensor".
        if name == "type" and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if name == "to":
            args = tuple(map(_on_cpu, args))
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return CPU
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


class _Stream:
    """A stream of a device that runs one thing after the other."""

    cuda_stream, device = 0, CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ``torch.cuda.Stream`` takes."""

    def wait_stream(self, *args: Any) -> None:
        """Return: all that was started is done."""

    wait_event = synchronize = wait_stream

    def query(self) -> bool:
        return True

    def record_event(self, *args: Any) -> _Event:
        return _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ``torch.cuda.Event`` takes."""

    def record(self, *args: Any) -> None:
        """Return: all that was started is done."""

    wait = synchronize = record

    def query(self) -> bool:
        return True


def _returning(value: Any = None) -> Callable[..., Any]:
    return lambda *_, **__: value


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield each replacement as its owner, the attribute and the new value."""
    # They come first, since their imports read the genuine torch.cuda.
    experts = [*_experts(), *_uneven()]
    cuda, generator = torch.cuda, torch.default_generator

    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "_lazy_init",
        "ipc_collect",
        "reset_peak_memory_stats",
    ):
        yield cuda, name, _returning()
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        yield cuda, name, _returning(0)

    yield cuda, "current_device", _returning(CPU)
    yield cuda, "device_count", _returning(1)
    yield cuda, "get_device_capability", _returning((8, 0))
    yield cuda, "is_current_stream_capturing", _returning(False)
    yield cuda, "Stream", _Stream
    yield cuda, "Event", _Event
    for name in ("current_stream", "default_stream"):
        yield cuda, name, _returning(_Stream())
    for name in ("stream", "device"):
        yield cuda, name, _returning(contextlib.nullcontext())
    yield cuda, "_lazy_call", lambda callback, **_: callback()
    yield cuda, "default_generators", defaultdict(lambda: generator)

    for owner in (cuda, cuda.random):
        for name in ("manual_seed", "manual_seed_all"):
            yield owner, name, lambda seed: generator.manual_seed(int(seed))
        yield owner, "initial_seed", generator.initial_seed
        yield owner, "get_rng_state", lambda *_, **__: torch.get_rng_state()
        yield owner, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)
    # Both devices share one state.
    yield logging.getLogger("megatron.core.tensor_parallel.random"), "disabled", True

    for name in ("range_push", "range_pop", "mark"):
        yield cuda.nvtx, name, _returning()
    for name in (
        "FloatTensor",
        "HalfTensor",
        "BFloat16Tensor",
        "IntTensor",
        "LongTensor",
        "ByteTensor",
    ):
        yield cuda, name, getattr(torch, name)

    for owner in (torch.Tensor, torch.nn.Module):
        yield owner, "cuda", lambda self, *_, **__: self
    yield torch.Tensor, "record_stream", _returning()
    yield from experts


def _experts() -> Iterator[tuple[Any, str, Any]]:
    """Replace what the experts' modules take from Transformer Engine.

    A copy to the host that they only make from a GPU is replaced too.
    """
    utils = import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = import_module("megatron.core.transformer.moe.token_dispatcher")

    def to_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    yield utils, "te_general_gemm", None
    latent = import_module("megatron.core.transformer.multi_latent_attention")
    yield latent, "HAVE_TE", False
    yield latent, "TELinear", import_module("coupler_engine_megatron.linear").WholeLinear

    for owner in (utils, dispatcher):
        yield owner, "maybe_move_tensor_to_cpu", to_host


def _uneven() -> Iterator[tuple[Any, str, Any]]:
    """Exchange pieces of different sizes among the ranks that split an expert's
    matrices.

    gloo moves such pieces in an all-to-all only.
    """
    mappings = import_module("megatron.core.tensor_parallel.mappings")
    even_gather = mappings._gather_along_first_dim
    even_reduce = mappings._reduce_scatter_along_first_dim

    def exchange(tensor: Any, group: Any, sent: list[int], received: list[int]) -> Any:
        output = tensor.new_empty(sum(received), *tensor.shape[1:])
        dist.all_to_all_single(output, tensor.contiguous(), received, sent, group=group)
        return output

    def gather(tensor: Any, group: Any, sizes: list[int] | None = None, *more: Any) -> Any:
        if sizes is None or group.size() == 1:
            return even_gather(tensor, group, sizes, *more)
        copies = tensor.expand(group.size(), *tensor.shape).flatten(0, 1)
        return exchange(copies, group, [len(tensor)] * group.size(), sizes)

    def reduce(tensor: Any, group: Any, sizes: list[int] | None = None, *more: Any) -> Any:
        if sizes is None or group.size() == 1:
            return even_reduce(tensor, group, sizes, *more)
        mine = sizes[group.rank()]
        pieces = exchange(tensor, group, sizes, [mine] * group.size())
        return pieces.unflatten(0, (group.size(), mine)).sum(0)

    yield mappings, "_gather_along_first_dim", gather
    yield mappings, "_reduce_scatter_along_first_dim", reduce
