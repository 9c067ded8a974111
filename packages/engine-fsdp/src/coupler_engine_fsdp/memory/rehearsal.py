"""Rehearse one micro-batch of a policy on the meta device, and count its memory.

The tensors have shapes and no content. Every operation that the engine would call is
called, so that the count holds for any model that the engine can train.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from coupler_engine_fsdp.model import Policy, layers_of, recomputes
from coupler_engine_fsdp.packing import Packed
from coupler_engine_fsdp.value import ValueModel

META = torch.device("meta")
ATTENTION = "coupler_rehearsal"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")
"""Operations whose operands a compiled backward pass does not compute again."""


@dataclass(frozen=True)
class Rehearsal:
    """The memory of one micro-batch, in bytes, without parameters.

    Attributes:
        forward: most in a pass without gradient.
        saved: what a pass with gradient leaves for the backward pass.
        compiled: what compiled layers leave: the operands of matrix products and of
            attention, and the input of each norm. They compute the rest again.
        course: most memory besides gradients, by the bytes of gradients that there
            were.
    """

    forward: int
    saved: int
    compiled: int
    course: dict[int, int]

    def peak(self, share: float) -> int:
        """Return the most memory of the two passes together.

        Args:
            share: bytes that the engine keeps for each byte of a gradient.
        """
        return int(max(rest + share * gradients for gradients, rest in self.course.items()))


def rehearse(
    policy: Policy | ValueModel, tokens: int, rows: int, *, gpu: bool, copies: bool
) -> Rehearsal:
    """Count the memory of one micro-batch.

    Args:
        policy: on the meta device, with parameters of the dtype that computes.
        tokens: those of the micro-batch on this rank.
        rows: predicted tokens among them.
        gpu: whether the kernels are those of a GPU.
        copies: whether attention copies its output, as sequence parallelism does and
            the CPU.
    """
    forward = without_gradient(policy, tokens, rows, gpu=gpu, copies=copies)
    parameters = list(policy.parameters())
    shape = policy.causal.config.get_text_config()
    # A layer that is computed again leaves its input alone.
    inputs = 2 * shape.num_hidden_layers - sum(map(recomputes, layers_of(policy)))
    norms = inputs * tokens * shape.hidden_size

    with _Storages(parameters, gpu) as storages:
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(storages.received)
        total = _outputs(policy, _packed(tokens, rows, _Kernel(copies, storages))).sum()
        saved = storages.now
        compiled = storages.of_products() + norms * parameters[0].itemsize
        if total.requires_grad:
            total.backward()
    return Rehearsal(forward, saved, compiled, storages.course)


def without_gradient(
    policy: Policy | ValueModel, tokens: int, rows: int, *, gpu: bool, copies: bool
) -> int:
    """Return the most memory of a pass without gradient, as :func:`rehearse` takes."""
    policy.to(META)
    policy.causal.set_attn_implementation(ATTENTION)
    with torch.no_grad(), _Storages(list(policy.parameters()), gpu) as storages:
        _outputs(policy, _packed(tokens, rows, _Kernel(copies, storages)))
    return storages.peak


def _outputs(policy: Policy | ValueModel, packed: Packed) -> Tensor:
    found = policy(packed)
    return found["logprobs"] if isinstance(policy, Policy) else found["values"]


def _packed(tokens: int, rows: int, kernel: _Kernel) -> Packed:
    """Return what :func:`coupler_engine_fsdp.packing.pack` does, without content."""

    def ids(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=META)

    return Packed(
        tokens=ids(1, tokens),
        positions=ids(1, tokens),
        packing=kernel,  # type: ignore[arg-type]
        rows=ids(rows),
        sources=ids(rows),
        targets=ids(rows),
        temperature=torch.empty(rows, device=META),
        kept=None,
    )


@dataclass(frozen=True)
class _Kernel:
    """Stand for the packing that attention reads."""

    copies: bool
    storages: _Storages


class _Attention(torch.autograd.Function):
    """Leave and take the memory that a fused kernel does."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        _, heads, tokens, _ = query.shape
        out = query.new_empty(1, tokens, heads, value.shape[-1])
        sums = query.new_empty(heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, _, _ = ctx.saved_tensors
        # Kernels add the gradient of queries up in fp32.
        summed = torch.empty_like(query, dtype=torch.float32)
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        del summed
        return grads


def _attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    packing: _Kernel,
    **_unused: object,
) -> tuple[Tensor, None]:
    out = _Attention.apply(query, key, value)
    packing.storages.use(query, key, value, out)
    return (out.clone() if packing.copies else out), None


AttentionInterface.register(ATTENTION, _attention)


class _Storages(TorchDispatchMode):
    """Count the bytes of storages that live, without those of parameters.

    Attributes:
        now: bytes besides gradients.
        peak: most of them so far.
        course: most of them by the bytes of gradients.
    """

    def __init__(self, parameters: list[nn.Parameter], gpu: bool) -> None:
        super().__init__()
        self.gpu = gpu
        self.sizes: dict[int, int] = {}
        self.left = {_key(parameter) for parameter in parameters}
        self.used: set[int] = set()
        self.now = self.peak = self.gradients = 0
        self.course = {0: 0}
        self.results = _Results()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operands in fp8 are tensors in a wrapper, whose own operations come back here.
        if any(is_traceable_wrapper_subclass(tensor) for tensor in _tensors((args, kwargs))):
            return NotImplemented
        # PyTorch knows the shape of a grouped product of bf16 alone.
        grouped = func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16
        call = _grouped if grouped else self.results.of(func)
        out = call(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._count(tensor)
        # PyTorch's own holds the exponentials meanwhile. Kernels for GPUs do not.
        if func._schema.name == "aten::logsumexp" and not self.gpu:
            self._note(args[0].nbytes)
        if func._schema.name in PRODUCTS:
            self.use(*_tensors(args), *_tensors(out))
        return out

    def use(self, *tensors: Tensor) -> None:
        """Note operands of products and of attention."""
        self.used |= {_key(tensor) for tensor in tensors}

    def _count(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self.left or key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += self.sizes[key]
        weakref.finalize(storage, self._freed, key)
        self._note()

    def _note(self, on_top: int = 0) -> None:
        now = self.now + on_top
        self.peak = max(self.peak, now)
        self.course[self.gradients] = max(self.course.get(self.gradients, 0), now)

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)
        self.used.discard(key)

    def received(self, parameter: Tensor) -> None:
        """Count a gradient that a parameter got apart from the rest."""
        assert parameter.grad is not None
        key = _key(parameter.grad)
        size = self.sizes.pop(key, 0)
        self.left.add(key)
        self.now, self.gradients = self.now - size, self.gradients + size
        self._note()

    def of_products(self) -> int:
        """Return the bytes that products and attention used, of those that live."""
        return sum(self.sizes.get(key, 0) for key in self.used)


class _Results:
    """Make what an operation returned before for operands of the same shapes.

    PyTorch works each shape out in Python, and layers repeat one another.
    """

    def __init__(self) -> None:
        self.made: dict[Any, list[Callable[[], Tensor | None]]] = {}

    def of(self, func: Any) -> Callable[..., Any]:
        """Return ``func``, or a faster one that returns the same."""
        return partial(self._repeat, func) if _makes_new_tensors(func) else func

    def _repeat(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        asked = (func, _described(args), _described(tuple(kwargs.items())))
        try:
            makers = self.made.get(asked)
        except TypeError:  # what cannot be a key
            return func(*args, **kwargs)
        if makers is not None:
            made = tuple(make() for make in makers)
            return made[0] if len(made) == 1 else made

        out = func(*args, **kwargs)
        several = out if isinstance(out, tuple) else (out,)
        if _are_new([each for each in several if each is not None], _tensors((args, kwargs))):
            self.made[asked] = [_maker(each) for each in several]
        return out


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Tell if nothing that the operation returns or changes is one of its operands."""
    named = (*func._schema.arguments, *func._schema.returns)
    return all(each.alias_info is None for each in named)


def _described(value: Any) -> Any:
    """Return what decides of the shapes of a result, 1 and 1.0 apart."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _are_new(made: list[Any], operands: Iterable[Tensor]) -> bool:
    """Tell if these are tensors, each with a storage of its size and of its own."""
    if not all(isinstance(each, Tensor) for each in made):
        return False
    own = set(map(_key, made)) - set(map(_key, operands))
    whole = (each.numel() * each.itemsize == each.untyped_storage().nbytes() for each in made)
    return len(own) == len(made) and all(whole)


def _maker(tensor: Tensor | None) -> Callable[[], Tensor | None]:
    if tensor is None:
        return lambda: None
    shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=tensor.device)


def _grouped(a: Tensor, b: Tensor, offs: Tensor, *_unused: object) -> Tensor:
    """Return the memory of a grouped product, whose groups end at ``offs`` [groups].

    They split the rows of ``a`` [rows, in], whose weights are ``b`` [groups, in, out].
    Or they split ``in`` of two matrices, of which each group has a product.
    """
    groups = [len(offs)] if b.ndim == 2 else []
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
