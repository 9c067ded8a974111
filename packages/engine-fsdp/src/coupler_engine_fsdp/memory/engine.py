"""Estimate what a rank of ``engine=fsdp`` needs in each phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coupler.engine_kit.memory_plan import Asked, Kind, Needs, Phase, Term, largest
from coupler.engine_kit.precision import Precision
from coupler.interfaces import Part
from coupler_engine_fsdp import fp8
from coupler_engine_fsdp.adamw8bit import blocks_of, bytes_of
from coupler_engine_fsdp.config import FSDPConfig, OptimizerName
from coupler_engine_fsdp.logprobs import default_chunk
from coupler_engine_fsdp.lora import Adapter
from coupler_engine_fsdp.memory.rehearsal import Rehearsal, rehearse
from coupler_engine_fsdp.model import Policy, build, layers_of, recomputes
from coupler_engine_fsdp.moments import PIECE
from coupler_engine_fsdp.muon import matrices_of
from coupler_engine_fsdp.value import ValueModel

MASTER = 4
"""Bytes of a number of fp32."""
QUANTISING = {False: 53, True: 0}
"""Bytes of each number of a weight that quantising its moments takes, by whether there
is a GPU. There it is compiled into one pass over memory.
"""
KEPT = 256
"""Estimates that a process keeps: a plan asks for most of them several times."""
_kept: dict[str, Needs] = {}


def needs(config: FSDPConfig, asked: Asked) -> Needs:
    """Estimate the memory of one rank, or return the estimate of an equal question.

    The policy is built on the meta device, and one micro-batch of it is rehearsed.

    Raises:
        CouplerError: the model cannot be built.
    """
    file = Path(asked.model.path, "config.json")
    shape = file.read_text(errors="replace") if file.is_file() else ""
    # An estimate does not depend on the memory that there is.
    question = f"{config} {replace(asked, device_bytes=0)} {shape}"
    if question not in _kept:
        found = _estimate(config, asked)
        if len(_kept) == KEPT:
            _kept.clear()
        _kept[question] = found
    return _kept[question]


def _estimate(config: FSDPConfig, asked: Asked) -> Needs:
    dtype = compute_dtype(config.dtype, asked.gpu)
    tokens = asked.micro_batch(config.max_tokens_per_gpu * config.sequence_parallel)
    tokens = -(-tokens // config.sequence_parallel)
    rows = max(tokens - max(tokens // asked.longest, 1) if asked.longest else tokens - 1, 1)

    tile = config.logits_tile or default_chunk(rows, asked.gpu)
    policy = build(asked.model, tile, config.recomputed)
    adapter = Adapter(config)
    if config.lora_rank:
        adapter.insert(policy.causal, layers_of(policy))
    if asked.model.frozen:
        policy.requires_grad_(False)
    operands = fp8.operand_bytes(policy, config, tokens) if config.compile else 0
    # Compiled layers cast in one pass, without the copies of each operation.
    if not config.compile:
        fp8.convert(policy, config, kernels=asked.gpu)
    sizes = _Sizes.of(policy, adapter, config, dtype)
    policy.to(dtype)

    copies = not asked.gpu or config.sequence_parallel > 1
    done = rehearse(policy, tokens, rows, gpu=asked.gpu, copies=copies)
    several = not asked.tokens or asked.tokens > tokens * config.sequence_parallel
    role = _Role(config, asked, sizes, done, several, operands)
    sending = (Term(f"the largest tensor, whole ({_named(dtype)})", role.whole_tensor()),)

    peaks = {
        Phase.LOGPROBS: role.without_gradient(),
        Phase.SYNC: sending,
        Phase.SAVING: sending,
    }
    if asked.trains:
        peaks[Phase.TRAINING] = largest(role.in_backward(), role.in_step())
    return Needs(held=role.held(), peaks=peaks, parameters=sizes.base, host=role.on_host())


def compute_dtype(precision: Precision, gpu: bool) -> torch.dtype:
    """Return the dtype of ``precision`` on a GPU or on the CPU."""
    half = precision == Precision.BF16 or (precision == Precision.AUTO and gpu)
    return torch.bfloat16 if half else torch.float32


def _named(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp32"


@dataclass(frozen=True)
class _Sizes:
    """Numbers in a model's tensors.

    Attributes:
        base: those of the model without an adapter.
        trained, frozen: those that training changes, and the others.
        matrices: those that Muon trains.
        moments: bytes of the optimizer's state.
        layer, root: the largest layer, and what FSDP gathers for the whole pass.
        ends: the larger of embeddings and head, where FSDP gathers them apart.
        tensor, matrix: the largest tensor, and the largest one that Muon trains.
        adapted: the largest weight that an adapter is added to.
        keeping: trained ones of the layers that keep their activations.
        width: bytes of a number of the dtype that computes.
    """

    base: int
    trained: int
    frozen: int
    matrices: int
    moments: int
    layer: int
    root: int
    ends: int
    tensor: int
    matrix: int
    adapted: int
    keeping: int
    width: int

    @classmethod
    def of(
        cls,
        policy: Policy | ValueModel,
        adapter: Adapter,
        config: FSDPConfig,
        dtype: torch.dtype,
    ) -> _Sizes:
        named = dict(policy.causal.named_parameters())
        layers = [_numel(layer.parameters()) for layer in layers_of(policy)]
        keeping = [layer for layer in layers_of(policy) if not recomputes(layer)]
        embedding: Any = policy.causal.get_input_embeddings().weight
        head: Any = policy.head.weight
        apart = [] if embedding is head else [embedding.numel(), head.numel()]

        muon = config.optimizer == OptimizerName.MUON
        of_muon = matrices_of(named, layers_of(policy) if muon else [])
        matrices = [named[name].numel() for name in of_muon]
        own = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        updates = _numel(tensor for name, tensor in named.items() if ".lora_" in name)
        every = _numel(named.values())
        trained = _numel(own.values())
        eight = config.optimizer == OptimizerName.ADAMW8BIT
        blocks = blocks_of(own, embedding) if eight else {}
        moments = sum(bytes_of(own[name].numel(), blocks.get(name, 0)) for name in own)

        return cls(
            base=every - updates,
            trained=trained,
            frozen=every - trained,
            matrices=sum(matrices),
            moments=moments - MASTER * sum(matrices),
            layer=max(layers),
            root=every - sum(layers) - sum(apart),
            ends=max(apart, default=0),
            tensor=max(tensor.numel() for tensor in named.values()),
            matrix=max(matrices, default=0),
            adapted=max((weight.numel() for weight in adapter.weights()), default=0),
            keeping=_numel(p for layer in keeping for p in layer.parameters() if p.requires_grad),
            width=dtype.itemsize,
        )


def _numel(tensors: Iterable[nn.Parameter]) -> int:
    return sum(tensor.numel() for tensor in tensors)


@dataclass(frozen=True)
class _Role:
    """The sums of one role, in bytes of one rank."""

    config: FSDPConfig
    asked: Asked
    sizes: _Sizes
    done: Rehearsal
    several: bool
    """There is more than one micro-batch in a step."""
    operands: int
    """Those in fp8 of a compiled product."""

    @property
    def shards(self) -> int:
        ranks = self.config.ranks
        return min(self.config.fsdp_size or ranks, ranks)

    @property
    def eight(self) -> bool:
        return self.config.optimizer == OptimizerName.ADAMW8BIT

    @property
    def alone(self) -> bool:
        return self.config.ranks == 1

    def held(self) -> dict[Kind, tuple[Term, ...]]:
        """Return what stays between calls."""
        sizes, width, path = self.sizes, self.sizes.width, self.asked.path
        lower = f"more {path}.ranks, or {path}.lora_rank"
        fewer = f"more {path}.ranks"
        copies = sizes.trained * width if self._copied else 0
        masters = 0 if self._masters_leave else self._share(sizes.trained * MASTER)

        params = [
            Term("weights in fp32", masters, lower),
            Term("copies in bf16", copies, fewer, parked=self._masters_leave),
            Term("frozen weights", self._share(sizes.frozen * width), fewer),
        ]
        bits = "in 8 bits" if self.eight else "in fp32"
        kept: dict[Kind, tuple[Term, ...]] = {
            Part.PARAMS: tuple(term for term in params if term.size)
        }
        if self.asked.trains and not self.config.offload_optimizer:
            kept[Part.OPTIMIZER] = (Term(f"moments {bits}", self._share(sizes.moments), lower),)
        return kept

    @property
    def _copied(self) -> bool:
        return self.alone and self.sizes.width != MASTER

    @property
    def _masters_leave(self) -> bool:
        return self._away and self._copied and not self.config.lora_rank

    @property
    def _away(self) -> bool:
        return self.asked.trains and self.config.offload_optimizer

    def on_host(self) -> int:
        """Return the host memory that the role always takes."""
        masters = MASTER * self.sizes.trained if self._masters_leave else 0
        return self.sizes.moments + masters if self._away else 0

    def _share(self, size: int) -> int:
        return -(-size // self.shards)

    def without_gradient(self) -> tuple[Term, ...]:
        return (
            Term("activations of a pass without gradient", self.done.forward, self._fewer()),
            Term("operands in fp8", self.operands, self._fewer()),
            *self._gathered(4 * self.sizes.width * self.sizes.layer),
        )

    def in_backward(self) -> tuple[Term, ...]:
        """Return the largest moment of the two passes of a micro-batch."""
        return largest(
            *(self._moment(gradients, rest) for gradients, rest in self.done.course.items())
        )

    def _moment(self, gradients: int, rest: int) -> tuple[Term, ...]:
        """Return the terms when gradients of so many bytes have come."""
        sizes = self.sizes
        whole = sizes.trained * sizes.width
        kept = int((whole if self.several else gradients) * self._gradient_width() / sizes.width)
        # The gradient before is still being reduced, in fp32.
        at_head = gradients < sizes.ends * sizes.width
        before = 0 if at_head else sizes.layer
        unit = sizes.ends if at_head else sizes.layer
        sent = sizes.width * (unit + sizes.layer) + MASTER * before

        return (
            Term("gradients", kept, f"more {self.asked.path}.ranks"),
            Term("activations", self._compiled(rest, gradients), self._recompute()),
            Term("operands in fp8", self.operands, self._fewer()),
            *self._gathered(sent),
        )

    def _gradient_width(self) -> float:
        """Return the bytes that a rank keeps of each number of the gradient."""
        if self.alone:
            return MASTER if self.several else self.sizes.width
        whole = self.several and not self.config.sync_every_micro_batch
        return MASTER if whole else MASTER / self.shards

    def _compiled(self, size: int, gradients: int) -> int:
        """Scale what eager layers keep to what compiled ones do.

        They keep the operands of products and the input of each norm, and compute the
        rest again. Where whole layers are computed again, this is left out. That is so
        of the first layers once the gradients of the others have come.
        """
        recomputed = self.config.recomputed
        if not self.config.compile or recomputed is None:
            return size
        if recomputed and gradients > self.sizes.keeping * self.sizes.width:
            return size
        return int(size * self.done.compiled / self.done.saved)

    def _gathered(self, size: int) -> tuple[Term, ...]:
        if self.alone:
            return ()
        sizes, every = self.sizes, self.sizes.base * self.sizes.width
        size += sizes.width * sizes.root
        if not self.config.reshard_after_forward:
            size = max(size, every)
        lower = "" if self.config.reshard_after_forward else "engine.reshard_after_forward=true"
        return (Term("weights that FSDP gathers, and gradients it sums", size, lower),)

    def in_step(self) -> tuple[Term, ...]:
        """Return what the optimizer's step needs."""
        sizes = self.sizes
        in_place = self.alone and not self.several and self.asked.gpu and not sizes.matrices
        width = sizes.width if in_place else MASTER
        # One piece is updated while the next one comes.
        piece = min(max(PIECE, sizes.tensor), sizes.trained)
        two = min(2 * piece, sizes.trained)
        there = self.on_host() * two // max(sizes.trained, 1)
        cast = MASTER * piece if self.eight and width != MASTER else 0
        return (
            Term("gradients", self._share(width * sizes.trained)),
            Term("two pieces from the host", there),
            Term("gradients of a piece in fp32", cast),
            Term("products of Muon", (3 * MASTER + 4 * sizes.width) * sizes.matrix),
            Term("moments of a weight in fp32", self._quantising()),
        )

    def _quantising(self) -> int:
        each = QUANTISING[self.asked.gpu] if self.eight else 0
        return self._share(each * self.sizes.tensor)

    def whole_tensor(self) -> int:
        """Return the bytes of the largest tensor on its way to a rollout."""
        sizes, gpu = self.sizes, self.asked.gpu
        width = compute_dtype(self.config.sync_dtype, gpu).itemsize
        cast = width != (sizes.width if self.config.lora_rank else MASTER)
        if self._masters_leave:
            # Copies are sent, or masters from the host, where the CPU's are already.
            cast = gpu and width != sizes.width

        # The sum with an adapter beside the one before. The CPU casts the weight first.
        terms = [MASTER, width, MASTER * (not gpu and sizes.width != MASTER)]
        return max(width * sizes.tensor * (cast or not self.alone), sum(terms) * sizes.adapted)

    def _fewer(self) -> str:
        return f"a smaller {self.asked.path}.max_tokens_per_gpu"

    def _recompute(self) -> str:
        if self.config.recomputed is None:
            return self._fewer()
        if self.config.recomputed:
            return f"a larger {self.asked.path}.recompute_num_layers"
        return f"{self.asked.path}.gradient_checkpointing=true"
