"""Implement ``engine=megatron``: one rank of a Megatron-Core trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from coupler.batch import Batch
from coupler.batch.columns import OF_ENGINES, ROUTED_EXPERTS
from coupler.engine_kit.loss import weighted_loss
from coupler.engine_kit.micro_batches import Refusal, agreed_split, split
from coupler.engine_kit.parked import Keep, Parked
from coupler.engine_kit.precision import dtype_of
from coupler.engine_kit.process_group import Membership, device_of, join, require_same_ranks
from coupler.engine_kit.saved import State, open_saved
from coupler.engine_kit.tensors import columns
from coupler.interfaces import (
    Engine,
    Head,
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
from coupler_engine_megatron import bridge, checkpoint, cpu, groups
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.distributed import destroy_groups, exchange, split_world
from coupler_engine_megatron.folder import Folder
from coupler_engine_megatron.lora import Adapter
from coupler_engine_megatron.lora_tensors import is_adapter
from coupler_engine_megatron.memory import held
from coupler_engine_megatron.optimizer import Optimizer, wrap
from coupler_engine_megatron.packing import Alignment, Packed, pack
from coupler_engine_megatron.routing import Routers
from coupler_engine_megatron.settings import be_deterministic, check_layout, transformer_settings
from coupler_engine_megatron.weights import Catalogue

LOGPROBS, BASE = Output("logprobs"), Output("base_logprobs")
# The states of a parameter that a checkpoint has, with the folders of their names.
SAVED: Mapping[Part, Mapping[State, str]] = {
    Part.PARAMS: {"param": "params"},
    Part.OPTIMIZER: {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
}


class MegatronEngine(Engine):
    """One rank of Megatron-Core.

    Ranks that split a model read the same data shard, and the first of them with the
    model's last layer answers. A rank that never trains holds neither gradients nor an
    optimizer.
    """

    config: MegatronConfig

    def __init__(self, config: MegatronConfig, model: Model) -> None:
        super().__init__(config, model)
        self._optimizer: Optimizer | None = None
        self._membership: Membership | None = None
        self._parked = Parked()
        self._were_off: Parts = frozenset()

    def setup(self, rank: Rank) -> Layout:
        """Join the groups and load this rank's part of the model.

        Raises:
            CouplerError: ``model.path`` holds no model that this engine can train, and
                the message says why.
            ConfigError: the parallel sizes do not fit the model or the ranks.
        """
        self.device = device_of(rank)
        on_gpu = self.device.type == "cuda"
        if not on_gpu:
            cpu.check_version()
        if rank.deterministic:
            be_deterministic()

        shape = bridge.read_config(self.model)
        check_layout(self.config, shape, rank)
        self._membership = join(rank, self.device)
        require_same_ranks(rank)

        self.dtype = dtype_of(self.config.dtype, self.device)
        settings = transformer_settings(
            self.config, shape, rank, fused=on_gpu and self.dtype == torch.bfloat16
        )
        with self._platform():
            layout = split_world(self.config, rank)
            tensor = self.config.tensor_parallel
            self.bridge = bridge.make_bridge(
                shape,
                self.model.head,
                self.dtype,
                on_gpu,
                tensor,
                plain=bool(self.config.lora_rank),
                **settings,
            )
            self.transformer = self.bridge.config
            self.chunks: list[Any] = bridge.build(
                self.bridge, self.model.head, self.config.logits_tile, self.device
            )

        self.transformer.finalize_model_grads_func = _finalize
        self.align = Alignment.of(
            self.config.context_parallel, tensor if self.transformer.sequence_parallel else 1
        )
        self._list_parameters()
        losses = self.config.moe_aux_loss_coeff, self.config.moe_z_loss_coeff
        self.routers = Routers(self.chunks, self.transformer, *losses, self.device)
        if self.config.freeze_moe_router:
            self.routers.freeze()
        self._read_weights(tied=shape.tie_word_embeddings, seed=exchange(rank.seed)[0])
        return layout

    def _list_parameters(self) -> None:
        """Insert the adapter, and list what is sent, and what is trained."""
        bucket = self.config.sync_bucket_mib * 2**20
        self.adapter = Adapter(self.config, self.bridge)
        if self.adapter.rank:
            self.adapter.insert(self.chunks)

        self.catalogue = Catalogue(
            self.bridge,
            self.chunks,
            bucket,
            lambda name, _: not is_adapter(name),
        )
        self.trained = self.catalogue
        if self.adapter.rank:
            self.trained = Catalogue(
                self.bridge,
                self.chunks,
                bucket,
                lambda _, parameter: parameter.requires_grad,
            )

    def forward(self, batch: Batch, want: tuple[Output, ...]) -> Batch:
        """Compute the wanted outputs, one micro-batch after the other.

        Raises:
            CouplerError: a sequence is longer than ``engine.max_tokens_per_gpu``.
        """
        if BASE in want:
            with self.adapter.off():
                base = self.forward(batch, (LOGPROBS,))["logprobs"]
            rest = tuple(output for output in want if output != BASE)
            done = self.forward(batch, rest) if rest else batch
            return done.with_tokens(**{BASE.name: base})

        names = tuple(output.name for output in want if output.name != ROUTED_EXPERTS)
        names = names or ("logprobs",)
        inputs = batch.with_tokens(row=np.arange(batch.num_tokens))
        optional = (name for name in ("temperature", *OF_ENGINES) if batch.has(name))
        inputs = inputs.select("tokens", "loss_mask", "row", *optional)

        done = {name: np.zeros(batch.num_tokens, np.float32) for name in names}
        record = None
        if Output(ROUTED_EXPERTS) in want:
            record = self.routers.empty_record(batch.num_tokens)

        def keep(packed: Packed, outputs: Tensor) -> tuple[Tensor, Metrics]:
            row = packed.batch["row"][packed.rows.cpu().numpy()]
            for name, values in zip(names, outputs.unbind(1), strict=True):
                done[name][row] = values.float().cpu().numpy()
            return outputs.sum(), {}

        with torch.no_grad():
            self._run(inputs, names, keep, record=record)
        if record is not None:
            done[ROUTED_EXPERTS] = self.routers.whole_record(record)
        return batch.with_tokens(**{output.name: done[output.name] for output in want})

    def forward_backward(
        self, batch: Batch, want: tuple[Output, ...], loss: Loss, step: StepInfo
    ) -> Metrics:
        """Sum the gradient of all micro-batches.

        Raises:
            CouplerError: a sequence is longer than ``engine.max_tokens_per_gpu``, or
                the loss is not one per token.
        """
        optimizer = self._trained()
        names = tuple(output.name for output in want)
        with self._platform():
            optimizer.clear()

        optimizer.has_gradient = True
        self.routers.clear()
        parts = self._run(batch, names, partial(self._loss, names, loss), step)

        with self._platform():
            self._norm = optimizer.norm()
        return read(merge(parts)) | self.routers.metrics()

    def _loss(
        self, names: tuple[str, ...], loss: Loss, packed: Packed, outputs: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Sum the loss of one micro-batch.

        Neither a gradient nor a NaN gets in or out outside ``loss_mask``.
        """
        if not len(packed.batch):
            return outputs.sum(), {}

        zeros = torch.zeros(packed.batch.num_tokens, device=self.device)
        spread = {
            name: zeros.index_copy(0, packed.rows, values)
            for name, values in zip(names, outputs.unbind(1), strict=True)
        }
        return weighted_loss(loss, spread, columns(packed.batch, self.device))

    def _run(
        self,
        batch: Batch,
        want: tuple[str, ...],
        finish: Any,
        info: StepInfo | None = None,
        record: Tensor | None = None,
    ) -> list[Metrics]:
        """Send the micro-batches through all pipeline stages.

        ``finish`` ends each one on the last stage.

        Args:
            info: facts of the step whose gradient is wanted; None for no gradient.
            record: receives the experts of every token; None if nobody asks for them.
        """
        micros = [batch.take(rows) for rows in self._micro_batches(batch)]
        chunks, share = self.chunks, 1 / max(info.total_tokens, 1) if info else 0.0

        def step(batches: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, Any]:
            micro = next(batches)
            packed = self._pack(micro.without(ROUTED_EXPERTS))
            packed.params.routed = self.routers.tokens(micro, packed.held, share, record)
            model = _unwrapped(chunk)
            if model.post_process:
                head = bridge.head_of(model)
                head.packed, head.want = packed, want
            output = chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.params)
            return output, partial(end, packed)

        def end(packed: Packed, outputs: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            total, metrics = finish(packed, outputs)
            return total, torch.zeros((), dtype=torch.int, device=self.device), metrics

        with self._platform():
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(micros) for _ in chunks] if len(chunks) > 1 else iter(micros),
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=len(micros),
                # Not used: stages tell each other the shapes.
                seq_length=self.align.total,
                micro_batch_size=1,
                forward_only=info is None,
            )

    def _pack(self, batch: Batch) -> Packed:
        group = groups.context()
        return pack(batch, self.device, self.align, group.size(), group.rank())

    def _micro_batches(self, batch: Batch) -> list[np.ndarray]:
        """Cut a batch into as many micro-batches on every rank. Some may be empty."""
        routes = self.routers.problem(batch)
        unroutable = Refusal(
            f"{routes}." if routes else "",
            "another rank got routed_experts that it cannot replay.",
            "router_replay=disabled, or look at what the rollout returns",
        )

        limit = self.config.max_tokens_per_gpu
        ranks = self.config.ranks_per_sequence
        cut = partial(split, batch, limit * ranks)
        # Parts of the model take turns over as many micro-batches as there are stages.
        stages = self.config.pipeline_parallel if len(self.chunks) > 1 else 1
        return agreed_split(
            cut,
            limit,
            self.device,
            [None],
            unroutable,
            multiple_of=stages,
            ranks_per_sequence=ranks,
        )

    def step(self) -> StepResult:
        """Apply the gradient.

        A skipped step advances neither the schedule nor Adam's count.
        """
        assert self._optimizer is not None, "step() follows forward_backward()"
        self._parked.arrive()
        with self._platform():
            return self._optimizer.step(self._norm)

    def weights(self) -> Iterator[Named]:
        """Yield the weights in ``engine.sync_dtype``."""
        return self._sent(self.catalogue, self.adapter.merged)

    def base_weights(self) -> Iterator[Named]:
        """Yield the weights beneath the adapter in ``engine.sync_dtype``."""
        return self._sent(self.catalogue, _itself)

    def adapter_weights(self) -> Iterator[Named]:
        """Yield the adapter in ``engine.sync_dtype``."""
        return self.adapter.apart(self._sent(self.trained, _itself))

    def _sent(
        self, parameters: Catalogue, source: Callable[[nn.Parameter], Tensor]
    ) -> Iterator[Named]:
        dtype = dtype_of(self.config.sync_dtype, self.device, self.dtype)
        if self._optimizer is not None:
            with self._platform():
                self._optimizer.gather()
        return parameters.stream(source, dtype, self.device)

    def gradients(self) -> Iterator[Named]:
        """Yield the gradient in fp32."""
        source = partial(self._trained().whole, state="grad")
        return self.adapter.targeted(self.trained.stream(source, torch.float32, self.device))

    def save(self, path: Path, what: Parts) -> Pending:
        """Copy parameters and optimizer to the host, and write them while training goes
        on.

        There is no gradient to save: checkpoints are made between steps.
        """
        self._parked.arrive()
        facts = {"num_steps": self._trained().num_steps} if Part.OPTIMIZER in what else {}
        return checkpoint.Save(path, self._states(what), facts)

    def _states(self, what: Parts) -> Iterator[Named]:
        for part in sorted(what & SAVED.keys()):
            for state, folder in SAVED[part].items():
                source = partial(self._state, state)
                tensors = self.trained.stream(source, torch.float32, self.device)
                for name, tensor in self.adapter.targeted(tensors):
                    yield f"{folder}/{name}", tensor

    def _state(self, state: str, parameter: nn.Parameter) -> Tensor:
        return parameter if self._optimizer is None else self._optimizer.whole(parameter, state)

    def load(self, path: Path, what: Parts) -> None:
        """Read what an engine saved on ranks that split the model in any way.

        Raises:
            CouplerError: ``path`` does not hold it.
        """
        self._parked.arrive()
        self._parked.forget()
        if Part.OPTIMIZER in what:
            self._trained()

        with open_saved(path) as saved:
            for part in sorted(what & SAVED.keys()):
                for state in SAVED[part]:
                    read = self.adapter.reading(partial(saved.tensor, state))
                    self.trained.fill(read, partial(self._put, state))
            if self._optimizer is not None:
                steps = saved.num_steps if Part.OPTIMIZER in what else None
                with self._platform():
                    self._optimizer.resume(self._optimizer.num_steps if steps is None else steps)

    def _put(self, state: str, parameter: nn.Parameter, piece: Tensor) -> None:
        if self._optimizer is None:
            parameter.copy_(piece)
        else:
            self._optimizer.put(parameter, state, piece)

    def offload(self, what: Parts) -> None:
        """Move ``what`` to the host and give its memory back to the device.

        It does nothing on the CPU.
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

    def _park(self, what: Parts) -> None:
        self._were_off |= what
        for part in what:
            for name, (tensors, keep) in self._held(part).items():
                self._parked.offload(name, tensors, keep)

    def _unpark(self, what: Parts) -> None:
        for part in what:
            for name in self._held(part):
                self._parked.onload(name, wait=part is not Part.OPTIMIZER)

    def _held(self, part: Part) -> dict[str, tuple[list[Tensor], Keep]]:
        parameters = [*self.catalogue.parameters.values(), *self.trained.parameters.values()]
        return held(part, parameters, self._optimizer)

    def device_bytes(self) -> int:
        """Return the memory that PyTorch holds on the device, caches included.

        It is 0 on the CPU.
        """
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def close(self) -> None:
        """Leave the process group. The last engine of a process destroys all groups."""
        self._parked.close()
        if self._membership is not None:
            self._membership.leave(before=destroy_groups)

    def _trained(self) -> Optimizer:
        """Return the optimizer. The first call makes it, and the gradient buffers."""
        if self._optimizer is None:
            with self._platform():
                self.chunks = wrap(self.config, self.chunks, self.transformer)
                self._optimizer = Optimizer(self.config, self.chunks, self.dtype)
            # A thread makes the host memory that it leaves for after the step.
            if Part.OPTIMIZER in self._were_off:
                self._parked.prepare("optimizer", self._optimizer.states())
        return self._optimizer

    def _read_weights(self, *, tied: bool, seed: int) -> None:
        folder, head = Folder(Path(self.model.path)), self.model.head
        score = [*bridge.SCORE[head].values()]
        dropped = ("lm_head.",) if tied or head is not Head.LM else ()
        folder.check(self.catalogue.names(), score, (*dropped, *bridge.untrained(self.bridge)))
        self.catalogue.fill(folder.read, partial(self._put, "param"))
        if self.adapter.rank:
            start = self.adapter.start(self.trained, folder, seed)
            self.trained.fill(start, partial(self._put, "param"))

    def _platform(self) -> AbstractContextManager[None]:
        """Return the context that Megatron-Core runs in. On a GPU it does nothing."""
        return cpu.cuda_as_cpu() if self.device.type == "cpu" else nullcontext()


def _finalize(
    chunks: Sequence[nn.Module], _num_tokens: Tensor | None = None, **options: Any
) -> None:
    """Reduce gradients over all ranks. No number of tokens divides these sums."""
    finalize_model_grads(list(chunks), None, **options)


def _itself(parameter: nn.Parameter) -> Tensor:
    return parameter


def _unwrapped(chunk: Any) -> Any:
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk
