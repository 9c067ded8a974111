"""Implement ``engine=fsdp``: one rank of a PyTorch FSDP2 trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coupler.batch import Batch
from coupler.batch.columns import SAMPLING_MASK, TOP_IDS
from coupler.engine_kit.loss import weighted_loss
from coupler.engine_kit.micro_batches import agreed_split
from coupler.engine_kit.parked import Keep, Parked
from coupler.engine_kit.precision import dtype_of
from coupler.engine_kit.process_group import Membership, join
from coupler.engine_kit.tensors import columns
from coupler.errors import CouplerError
from coupler.interfaces import (
    Engine,
    Layout,
    Loss,
    Model,
    Named,
    Output,
    Part,
    Parts,
    Pending,
    Rank,
    StepInfo,
    StepResult,
)
from coupler.metrics import Metrics, merge, read
from coupler_engine_fsdp import checkpoint, foreign, fp8, weights
from coupler_engine_fsdp.adamw8bit import blocks_of
from coupler_engine_fsdp.check import check
from coupler_engine_fsdp.config import FSDPConfig, OptimizerName
from coupler_engine_fsdp.distributed import build_mesh, prepare_device
from coupler_engine_fsdp.held import CHANGING, held
from coupler_engine_fsdp.layout import check_layout, read_heads
from coupler_engine_fsdp.lora import Adapter
from coupler_engine_fsdp.masters import Masters, cast_frozen
from coupler_engine_fsdp.model import build, compile_layers, layers_of, materialise, shard
from coupler_engine_fsdp.muon import matrices_of
from coupler_engine_fsdp.optimizer import Optimizer
from coupler_engine_fsdp.packing import pack, split
from coupler_engine_fsdp.sequence import ALONE, join_peers, layout_of, leave_peers
from coupler_engine_fsdp.value import zero_absent
from coupler_engine_fsdp.weights import local

BASE, TOP_LOGPROBS = "base_logprobs", "top_logprobs"


class FSDPEngine(Engine):
    """One rank of FSDP2.

    It reads only its own part of the data. A rank that never trains holds no optimizer.
    """

    config: FSDPConfig

    def __init__(self, config: FSDPConfig, model: Model) -> None:
        super().__init__(config, model)
        self._optimizer: Optimizer | None = None
        self._membership: Membership | None = None
        # Host memory of the last checkpoint's copies, which the next one uses again.
        self._host: dict[str, Tensor] = {}
        self._leaves = False
        """Whether it was off its device before."""
        self.peers = ALONE
        self._parked = Parked()

    def setup(self, rank: Rank) -> Layout:
        """Join the group and load this rank's shards.

        Raises:
            CouplerError: ``model.path`` holds no model that this engine can train; the
                message says why.
            ConfigError: sizes do not fit the ranks or the model.
        """
        folder, size = Path(self.model.path), self.config.sequence_parallel
        self.device = prepare_device(rank)
        check_layout(self.config, rank.world, read_heads(folder))
        self._membership = join(rank, self.device)
        self.mesh = build_mesh(rank, self.device, self.config.fsdp_size)
        self.peers = join_peers(size)

        files = weights.files_of(folder) if folder.is_dir() else {}
        self.policy = build(self.model, self.config.logits_tile, self.config.recomputed)
        self.dtype = dtype_of(self.config.dtype, self.device)
        self.adapter = Adapter(self.config)
        if self.config.lora_rank:
            self.adapter.insert(self.policy.causal, layers_of(self.policy))
        fp8.convert(self.policy, self.config, kernels=fp8.has_kernels(self.config, self.device))
        if self.model.frozen:
            self.policy.requires_grad_(False)
        cast_frozen(self.policy, self.dtype)
        muon = self.config.optimizer == OptimizerName.MUON
        layers = layers_of(self.policy) if muon else []
        if self.config.compile:
            compile_layers(self.policy)
        # One rank has nothing to shard. FSDP's hooks would take 30 to 80 % of a step of
        # a tiny model.
        alone = rank.world == 1
        self.modules = []
        if not alone:
            reshard = self.config.reshard_after_forward
            self.modules = shard(self.policy, self.mesh, self.dtype, reshard)

        materialise(self.policy, self.device)
        updates = self.adapter.parameters()
        self.named, self.experts = weights.match(
            self.policy.causal, self.policy.names(files), apart=updates
        )

        weights.read(files, self.named, self.experts)
        zero_absent(self.named, files)
        self.adapter.bind(self.named, self.experts)
        self.adapter.start(rank, self.device)

        self.tensors = {**self.named, **updates}
        self.matrices = matrices_of(self.named, layers)
        eight = self.config.optimizer == OptimizerName.ADAMW8BIT
        embedding: Any = self.policy.causal.get_input_embeddings().weight
        self.blocks = blocks_of(self.tensors, embedding) if eight else {}
        self.masters = Masters()
        if alone and self.dtype != torch.float32:
            self.masters.split(self.policy, self.dtype)

        # Masters leave at once, so that they are never on the device beside a rollout.
        if self._masters_leave:
            self._optimizer = self._new_optimizer()
        check(self.policy, self.device, fp8.coarsest(self.config, self.dtype), self.peers)
        return layout_of(rank.world, size)

    def forward(self, batch: Batch, want: tuple[Output, ...]) -> Batch:
        """Compute the wanted outputs, one micro-batch after the other.

        Raises:
            CouplerError: a sequence is longer than ``engine.max_tokens_per_gpu``.
        """
        groups = self._micro_batches(batch)
        batch = batch.with_tokens(row=np.arange(batch.num_tokens))
        optional = [name for name in ("temperature", SAMPLING_MASK, TOP_IDS) if batch.has(name)]
        inputs = batch.select("tokens", "loss_mask", "row", *optional)

        parts: list[tuple[np.ndarray, dict[str, Tensor]]] = []
        with torch.no_grad():
            for group in groups:
                micro = inputs.take(group)
                parts.append((micro["row"], self._outputs(micro, want)))
        self._reshard()

        done = {name: _empty(values, batch.num_tokens) for name, values in parts[0][1].items()}
        for row, outputs in parts:
            for name, values in outputs.items():
                done[name][row] = values.cpu().numpy()
        return batch.with_tokens(**done)

    def forward_backward(
        self, batch: Batch, want: tuple[Output, ...], loss: Loss, step: StepInfo
    ) -> Metrics:
        """Sum the gradient of all micro-batches.

        Raises:
            CouplerError: a sequence is longer than ``engine.max_tokens_per_gpu``, or
                the loss is not one per token.
        """
        if self._optimizer is None:
            self._optimizer = self._new_optimizer()

        self._clear_gradients()
        groups = self._micro_batches(batch)
        self.masters.adding = len(groups) > 1
        parts: list[Metrics] = []

        # On one rank the gradient is whole anyway, so reducing it often saves nothing.
        every = self.config.sync_every_micro_batch and self.mesh.size() > 1
        for i, group in enumerate(groups):
            last = i == len(groups) - 1
            for module in self.modules:
                module.set_requires_gradient_sync(every or last, recurse=False)
                module.set_reshard_after_backward(
                    last or self.config.reshard_after_forward, recurse=False
                )
            parts.append(self._backward(batch.take(group), want, loss))

        # The norm is queued here, so that one wait for the device serves both.
        self._norm = self._optimizer.norm()
        return read(merge(parts))

    def _backward(self, micro: Batch, want: tuple[Output, ...], loss: Loss) -> Metrics:
        outputs = self._outputs(micro, want)
        if not len(micro):
            torch.cat([column.flatten() for column in outputs.values()]).sum().backward()
            return {}

        total, metrics = weighted_loss(loss, outputs, columns(micro, self.device))
        total.backward()
        return metrics

    def _outputs(self, micro: Batch, want: tuple[Output, ...]) -> dict[str, Tensor]:
        """Compute columns [T, ...], 0 outside ``loss_mask`` and whole on every peer.

        Raises:
            CouplerError: log-probs of ids are wanted, and the batch names no ids.
        """
        top_k = max((output.k for output in want if output.name == TOP_IDS), default=0)
        packed = replace(pack(micro, self.device, self.peers), top_k=top_k)
        if packed.ids is None and not top_k and TOP_LOGPROBS in (o.name for o in want):
            raise CouplerError(f"{TOP_LOGPROBS} is of the ids in {TOP_IDS}: the batch lacks it.")
        names = frozenset(output.name for output in want)
        computed = self.policy(packed, names) if names != {BASE} else {}
        if BASE in names:
            with self.adapter.off(), torch.no_grad():
                computed[BASE] = self.policy(packed)["logprobs"]

        columns = {o.name: packed.spread(computed[o.name], micro.num_tokens) for o in want}
        ids = {name: self.peers.whole(columns.pop(name)) for name in (TOP_IDS,) if top_k}
        if not columns:
            return ids

        # All real columns cross together.
        flat = [c if c.ndim > 1 else c[:, None] for c in columns.values()]
        widths = [column.shape[1] for column in flat]
        whole = self.peers.whole(torch.cat(flat, 1)).split(widths, 1)
        return ids | {
            name: part.reshape(column.shape)
            for (name, column), part in zip(columns.items(), whole, strict=True)
        }

    def _micro_batches(self, batch: Batch) -> list[np.ndarray]:
        """Cut a batch into as many micro-batches on every rank. Some may be empty."""
        room = self.config.max_tokens_per_gpu
        peers = self.peers.size
        cut = partial(split, batch, room * peers)
        axes = range(self.mesh.ndim) if self.mesh.size() > 1 else ()
        groups = [self.mesh.get_group(axis) for axis in axes]
        return agreed_split(cut, room, self.device, groups, ranks_per_sequence=peers)

    def step(self) -> StepResult:
        """Apply the gradient.

        A skipped step advances neither the schedule nor Adam's count.
        """
        assert self._optimizer is not None, "step() follows forward_backward()"
        self._parked.arrive()
        self._parked.forget(*CHANGING)
        return self._optimizer.step(float(self._norm))

    def weights(self) -> Iterator[Named]:
        """Yield the weights in ``engine.sync_dtype``."""
        dtype = self._sync_dtype()
        named = self._brought(dtype) if self._masters_leave else self.adapter.merge(self.named)
        return weights.stream(named, self.experts, dtype)

    def _brought(self, dtype: torch.dtype) -> Iterator[Named]:
        """Yield the weights on the device: copies if they have this dtype, or their
        masters from the host.
        """
        for name, tensor in self.named.items():
            copy = self.masters.copy_of(tensor)
            yield name, copy if copy.dtype == dtype else self._value(tensor).to(self.device)

    def base_weights(self) -> Iterator[Named]:
        """Yield the weights beneath the adapter in ``engine.sync_dtype``."""
        return weights.stream(self.named.items(), self.experts, self._sync_dtype())

    def adapter_weights(self) -> Iterator[Named]:
        """Yield the adapter in ``engine.sync_dtype``."""
        return weights.stream(self.adapter.apart(), {}, self._sync_dtype())

    def _sync_dtype(self) -> torch.dtype:
        return dtype_of(self.config.sync_dtype, self.device, self.dtype)

    def gradients(self) -> Iterator[Named]:
        """Yield the gradient in fp32."""
        self.masters.settle()
        names = self.adapter.names(self.tensors)
        tensors = {names[name]: tensor for name, tensor in self.tensors.items()}
        return weights.stream_gradients(tensors, self.experts | self.adapter.experts)

    def save(self, path: Path, what: Parts) -> Pending:
        """Copy parameters and optimizer to the host, and write them while training goes
        on.

        An engine that leaves its device copies them to where they go then anyway.
        There is no gradient to save: checkpoints are made between steps.
        """
        state = self._state(what)
        if self._leaves:
            self._host.clear()
            for part in what - {Part.GRADS}:
                for name, (tensors, keep) in self._held(part).items():
                    if keep is Keep.SAME:
                        self._parked.copy(name, map(local, tensors))

        save = checkpoint.save(path, state, self.mesh, self._host, self._parked.on_host)
        self._parked.read_by(save.end)
        return save

    def load(self, path: Path, what: Parts) -> None:
        """Read what an engine saved on any number of ranks.

        Raises:
            CouplerError: ``path`` does not hold it.
        """
        self._parked.settle()
        state = self._state(what)

        self._parked.forget()
        if checkpoint.is_native(path, state):
            checkpoint.load(path, state)
        else:
            state = self._state(what, as_saved=False)
            experts = self.experts | self.adapter.experts
            foreign.load(path, state, self.adapter.names(self.tensors), experts)

        if self._optimizer is not None and Part.OPTIMIZER in what:
            self._optimizer.num_steps = int(state["num_steps"])
        self.masters.refresh(values=self._value)
        self._reshard()

    def _state(self, what: Parts, as_saved: bool = True) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by their names there.

        Args:
            as_saved: whether moments are the tensors that are written. Without it they
                take numbers of any precision.
        """
        self._parked.arrive()
        state: dict[str, Tensor] = {}
        if Part.PARAMS in what:
            kept = self._kept().items()
            state |= {f"params/{name}": self._value(tensor).detach() for name, tensor in kept}

        if Part.OPTIMIZER in what:
            if self._optimizer is None:
                self._optimizer = self._new_optimizer()
            tensors = self._optimizer.state() if as_saved else self._optimizer.moments_of()
            state |= {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
            state["num_steps"] = torch.tensor(self._optimizer.num_steps)

        return state

    def _kept(self) -> dict[str, Tensor]:
        """Return the parameters of a checkpoint: with LoRA only the trained ones.

        The others are in ``model.path``.
        """
        if not self.config.lora_rank:
            return self.named
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    def offload(self, what: Parts) -> None:
        """Move ``what`` to the host and give the memory back to the device.

        It does nothing on the CPU.

        Raises:
            CouplerError: the host has too little memory.
        """
        if self.device.type == "cuda":
            self._park(what)
            torch.cuda.empty_cache()

    def onload(self, what: Parts) -> None:
        """Undo :meth:`offload`.

        What only :meth:`step` reads may still be on its way when this returns.
        """
        if self.device.type == "cuda":
            self._unpark(what)

    def device_bytes(self) -> int:
        """Return the memory that PyTorch holds on the device, caches included.

        It is 0 on the CPU.
        """
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def close(self) -> None:
        """Leave the process group. The last engine of this process destroys it."""
        self._parked.close()
        leave_peers(self.peers)
        if self._membership is not None:
            self._membership.leave()

    def _park(self, what: Parts) -> None:
        self._leaves = True
        self._reshard()
        if Part.OPTIMIZER in what and self._optimizer is None:
            self._prepare_optimizer()

        for part in what:
            for name, (tensors, keep) in self._held(part).items():
                self._parked.offload(name, map(local, tensors), keep)

    def _prepare_optimizer(self) -> None:
        """Make the optimizer, whose zeros leave without a copy, and let its host memory
        be mapped and pinned in a thread until it leaves after a step.
        """
        if self.model.frozen or self.config.offload_optimizer:
            return
        self._optimizer = self._new_optimizer()

        tensors = self._optimizer.tensors()
        self._parked.offload("optimizer", tensors, Keep.NOTHING)
        self._parked.prepare("optimizer", tensors)

    def _unpark(self, what: Parts) -> None:
        for part in what:
            for name in self._held(part):
                self._parked.onload(name, wait=part is not Part.OPTIMIZER)
        if Part.PARAMS in what and not self._masters_leave:
            self.masters.refresh()

    @property
    def _masters_leave(self) -> bool:
        """Tell if master weights are in host memory but in a step. Those of adapters
        are too small.
        """
        away = self.config.offload_optimizer and not self.model.frozen
        return away and not self.config.lora_rank and bool(self.masters.pairs)

    def _value(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a parameter, which may be in host memory."""
        return self._optimizer.moments.value(tensor) if self._optimizer else tensor

    def _held(self, part: Part) -> dict[str, tuple[list[Tensor], Keep]]:
        return held(part, self.policy, self.masters, self._optimizer, self._masters_leave)

    def _new_optimizer(self) -> Optimizer:
        trained = {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}
        parameters = {
            name: tensor for name, tensor in trained.items() if isinstance(tensor, nn.Parameter)
        }
        parked = self._parked if self.config.offload_optimizer else None
        pairs = self.masters.pairs if self._masters_leave else {}

        return Optimizer(
            self.config,
            parameters,
            self.masters,
            self.mesh,
            self.matrices,
            self.dtype,
            {name: block for name, block in self.blocks.items() if name in parameters},
            parked,
            [name for name, tensor in parameters.items() if id(tensor) in pairs],
        )

    def _clear_gradients(self) -> None:
        self.masters.clear()
        for tensor in self.tensors.values():
            tensor.grad = None

    def _reshard(self) -> None:
        """Drop gathered parameters, which would go stale.

        FSDP keeps those of the root after a forward pass without a backward pass.
        """
        for module in self.modules:
            module.reshard()


def _empty(values: Tensor, num_tokens: int) -> np.ndarray:
    """Return zeros for so many rows of an output: [num_tokens, ...]."""
    dtype = np.float32 if values.is_floating_point() else np.int32
    return np.zeros((num_tokens, *values.shape[1:]), dtype)
