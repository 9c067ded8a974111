"""Estimate what a rank of ``engine=megatron`` needs in each phase.

Weights, gradients and the optimizer's state follow from the shapes of the model's
tensors. :mod:`coupler_engine_megatron.activations` counts the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coupler.engine_kit.lora import LoRAConfig
from coupler.engine_kit.memory_plan import Asked, Kind, Needs, Phase, Term, largest, total
from coupler.engine_kit.precision import Precision
from coupler.errors import CouplerError
from coupler.interfaces import Head, Model, Part
from coupler_engine_megatron.activations import Layer
from coupler_engine_megatron.config import MegatronConfig, RecomputeMethod
from coupler_engine_megatron.layout import stage_layers
from coupler_engine_megatron.vocab_parallel import default_tile

FULL, MOMENTS = 4, 8
"""Bytes of a number of fp32, and of AdamW's two moments of it."""
LAYER, EXPERTS = re.compile(r"\blayers\.(\d+)\."), ".experts."


def needs(config: MegatronConfig, asked: Asked) -> Needs:
    """Estimate the memory of the rank that holds most.

    Raises:
        CouplerError: transformers cannot build the model.
    """
    sizes = Sizes.of(config, asked.model)
    stages = [Stage(config, asked, sizes, number) for number in range(config.pipeline_parallel)]
    most = max(stages, key=lambda stage: total(stage.terms()))

    # A third of the bucket at a time, or a tensor that is larger.
    bucket, tensor = config.sync_bucket_mib << 20, most.width * sizes.tensor
    sent = min(max(bucket, tensor + 2 * bucket // 3), 2 * most.width * sizes.base)
    whole = Term("whole tensors on their way", sent, f"{asked.path}.sync_bucket_mib")
    peaks = {
        # The last stage has the head.
        Phase.LOGPROBS: largest(*(stage.without_gradient() for stage in stages)),
        Phase.SYNC: (whole,),
        Phase.SAVING: (whole, Term("the largest tensor in fp32", FULL * sizes.tensor)),
    }
    if asked.trains:
        peaks[Phase.TRAINING] = most.in_training()

    latent = "activations of latent attention are counted as those of grouped heads"
    unknown = (latent,) if asked.shape.get("kv_lora_rank") else ()
    return Needs(held=most.held(), peaks=peaks, unknown=unknown, parameters=sizes.base)


@dataclass(frozen=True)
class Sizes:
    """Numbers in the tensors of a model, by what splits them.

    Attributes:
        embedding, head: the two ends. Tied ones have no head.
        layers: those of each layer, without experts.
        experts: those of the experts of each layer.
        updates: those of the adapter of each layer, without experts.
        of_experts: those of the adapter of each layer's experts.
        tensor: the largest tensor.
    """

    embedding: int
    head: int
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    updates: tuple[int, ...]
    of_experts: tuple[int, ...]
    tensor: int

    @classmethod
    def of(cls, config: LoRAConfig, model: Model) -> Sizes:
        """Build the model on the meta device, and count.

        Raises:
            CouplerError: transformers cannot build it.
        """
        trust = model.trust_remote_code
        try:
            shape = AutoConfig.from_pretrained(model.path, trust_remote_code=trust)
            with torch.device("meta"):
                causal = AutoModelForCausalLM.from_config(shape, trust_remote_code=trust)
        except Exception as error:  # transformers' own boundary
            raise CouplerError(f"model.path={model.path} cannot be built: {error}") from error

        number = shape.get_text_config().num_hidden_layers
        layers = [0] * number
        experts = [0] * number
        updates = [0] * number
        of_experts = [0] * number
        named = {name: tuple(tensor.shape) for name, tensor in causal.named_parameters()}
        for name, size in named.items():
            found = LAYER.search(name)
            if not found:
                continue
            index = int(found[1])
            if EXPERTS in name:
                experts[index] += prod(size)
                if config.targets(name.rpartition(".")[0]):
                    of_experts[index] += config.lora_rank * _sides(name, size)
                continue

            layers[index] += prod(size)
            if len(size) == 2 and config.targets(name):
                updates[index] += config.lora_rank * sum(size)

        embedding = causal.get_input_embeddings().weight
        head = causal.get_output_embeddings().weight
        apart = model.head is Head.LM and head is not embedding
        return cls(
            embedding.numel(),
            head.numel() if apart else 0,
            tuple(layers),
            tuple(experts),
            tuple(updates),
            tuple(of_experts),
            max(prod(size) for size in named.values() if len(size) < 3),
        )

    @property
    def base(self) -> int:
        return self.embedding + self.head + sum(self.layers) + sum(self.experts)


def _sides(name: str, size: tuple[int, ...]) -> int:
    """Count the rows and columns of all experts' matrices in [experts, rows, columns].

    A gate and an up in one parameter have columns of their own.
    """
    experts, rows, columns = size
    return experts * (rows + columns * (2 if name.endswith("gate_up_proj") else 1))


@dataclass(frozen=True)
class Stage:
    """The sums of one rank of a stage of the pipeline, in bytes."""

    config: MegatronConfig
    asked: Asked
    sizes: Sizes
    number: int

    @cached_property
    def width(self) -> int:
        """Return the bytes of a number of the dtype that computes."""
        half = self.config.dtype == Precision.BF16
        return 2 if half or (self.config.dtype == Precision.AUTO and self.asked.gpu) else FULL

    @cached_property
    def layers(self) -> range:
        config, number = self.config, len(self.sizes.layers)
        ends = config.first_stage_layers, config.last_stage_layers
        stages = config.pipeline_parallel
        split = stage_layers(number, stages, config.virtual_pipeline, *ends)
        if not split:
            split = [-(-number // stages)] * stages

        start = sum(split[: self.number])
        end = start + split[self.number]
        return range(start, min(end, number))

    @cached_property
    def tokens(self) -> int:
        config = self.config
        whole = self.asked.micro_batch(config.max_tokens_per_gpu * config.context_parallel)
        return -(-whole // config.context_parallel)

    @cached_property
    def layer(self) -> Layer:
        """Return the counts of the largest layer: one with experts, if any has some."""
        with_experts = any(self.sizes.experts[i] for i in self.layers)
        return Layer(self.config, self.asked, self.tokens, self.width, with_experts)

    @cached_property
    def last(self) -> bool:
        return self.number == self.config.pipeline_parallel - 1

    def terms(self) -> tuple[Term, ...]:
        held = [term for terms in self.held().values() for term in terms]
        return (*held, *(self.in_training() if self.asked.trains else self.without_gradient()))

    def numbers(self) -> tuple[int, int, int, int]:
        """Return this rank's weights outside of experts and in them, and those of the
        adapters of both.
        """
        sizes, config = self.sizes, self.config
        dense = 0
        experts = 0
        updates = 0
        of_experts = 0
        for index in self.layers:
            dense += sizes.layers[index]
            experts += sizes.experts[index]
            updates += sizes.updates[index]
            of_experts += sizes.of_experts[index]

        if self.number == 0:
            dense += sizes.embedding
        if self.last:
            dense += sizes.head
        # A last stage of its own has a copy of a tied embedding as its head.
        tied = self._has_head and not sizes.head
        if self.last and self.number and tied:
            dense += sizes.embedding

        tensor = config.tensor_parallel
        spread = config.expert_parallel * config.expert_tensor_parallel
        return dense // tensor, experts // spread, updates // tensor, of_experts // spread

    @property
    def _has_head(self) -> bool:
        return self.asked.model.head is Head.LM

    def held(self) -> dict[Kind, tuple[Term, ...]]:
        """Return what stays between calls."""
        config, path = self.config, self.asked.path
        dense, experts, updates, of_experts = self.numbers()
        split = f"more {path}.tensor_parallel or pipeline_parallel"
        more = f"more {path}.ranks, or {path}.lora_rank"
        every = dense + experts + updates + of_experts
        weights = Term("weights", self.width * every, split)
        if not self.asked.trains:
            return {Part.PARAMS: (weights,)}

        if config.lora_rank:
            dense, experts = updates, of_experts
        gradients = FULL * (dense + experts)

        # Ranks with the same part of the model share the optimizer's state.
        per_stage = config.ranks // config.pipeline_parallel
        spread = config.expert_parallel * config.expert_tensor_parallel
        own = dense // max(per_stage // config.tensor_parallel, 1)
        own += experts // max(per_stage // spread, 1)
        masters = 0 if self.width == FULL else FULL * own

        return {
            Part.PARAMS: (weights,),
            Part.GRADS: (Term("gradients in fp32", gradients, split),),
            Part.OPTIMIZER: (
                Term("moments in fp32", MOMENTS * own, more),
                Term("weights in fp32", masters, more),
            ),
        }

    def in_flight(self) -> float:
        """Return the micro-batches whose activations a stage holds at once.

        They are those of the schedule of arXiv 2104.04473, section 2.2.
        """
        config = self.config
        stages = config.pipeline_parallel
        turns = config.virtual_pipeline
        held = float(stages - self.number)
        if turns > 1:
            held = stages + (stages - 1) / turns

        if not self.asked.tokens:
            return held
        each = self.tokens * config.context_parallel
        there = -(-self.asked.tokens // each)
        return min(held, there)

    def in_training(self) -> tuple[Term, ...]:
        """Return the largest moment of the two passes: at the head, or in a layer."""
        config, layer = self.config, self.layer
        number, group = len(self.layers), config.recompute_num_layers
        kept = layer.saved * number
        again = layer.again
        free = 0

        if config.recomputes_layers:
            again = layer.saved
            if config.recompute_method == RecomputeMethod.UNIFORM:
                kept = layer.entry * -(-number // group)
                again *= group
            else:
                turns = config.virtual_pipeline
                shed = layer.saved - layer.entry
                kept -= shed * min(group * turns, number)
                # A part's first layers are computed again when its others are done.
                free = layer.saved * max(number // turns - group, 0)

        every = int(kept * self.in_flight())
        held, later = (Term("activations", n, self._recompute()) for n in (every, every - free))
        work, more = (
            Term("what a layer computes with", size + layer.working, self._fewer())
            for size in (layer.again, again)
        )
        return largest((held, self.head()), (held, work), (later, more))

    def head(self) -> Term:
        """Return what the head computes with: two tiles, and the states in fp32."""
        if not self.last or not self._has_head:
            return Term("what the head computes with", 0)
        rows = max(self.tokens - 1, 1)
        vocabulary = self.sizes.embedding // self.layer.hidden
        columns = -(-vocabulary // self.config.tensor_parallel)
        tile = self.config.logits_tile or default_tile(self.asked.gpu)
        logits = min(max(tile, 128 * rows), rows * columns)

        each = (FULL + 2 * self.width) * self.layer.hidden
        size = 2 * FULL * logits + each * rows
        return Term("what the head computes with", size, f"{self.asked.path}.logits_tile")

    def without_gradient(self) -> tuple[Term, ...]:
        work = Term("activations of a pass without gradient", self.layer.passing, self._fewer())
        return largest((work,), (self.head(),))

    def _fewer(self) -> str:
        return f"a smaller {self.asked.path}.max_tokens_per_gpu"

    def _recompute(self) -> str:
        if self.config.recomputes_layers:
            return self._fewer()
        return f"{self.asked.path}.gradient_checkpointing=full"
