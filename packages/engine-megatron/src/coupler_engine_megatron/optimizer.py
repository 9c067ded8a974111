"""Run Megatron's distributed AdamW, with clipping and a learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from coupler.engine_kit.adamw import multiplier
from coupler.interfaces import StepResult
from coupler_engine_megatron import groups
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.experts import GroupedLinear


def wrap(
    config: MegatronConfig, chunks: Sequence[nn.Module], transformer: Any
) -> list[DistributedDataParallel]:
    """Give the model's parts contiguous buffers of parameters and of fp32 gradients.

    Gradients are summed over ranks.
    """
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )
    wrapped = [
        DistributedDataParallel(
            config=transformer, ddp_config=buffers, module=chunk, disable_bucketing=i > 0
        )
        for i, chunk in enumerate(chunks)
    ]
    # Overlapping waits for every weight's own gradient.
    modules = [module for chunk in chunks for module in chunk.modules()]
    for module in modules:
        if isinstance(module, GroupedLinear):
            module.adds = not config.overlap_grad_reduce

    # The schedule holds the reduction back for all micro-batches but the last.
    if config.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in wrapped]
        transformer.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return wrapped


class Optimizer:
    """AdamW (arXiv 1711.05101) with its state split over data-parallel ranks.

    Each has the state of its part of every gradient buffer.
    """

    def __init__(
        self, config: MegatronConfig, chunks: list[DistributedDataParallel], dtype: torch.dtype
    ) -> None:
        self.config, self.chunks = config, chunks
        self.multiplier = multiplier(config)
        self.num_steps = 0
        """Steps that were applied."""
        self.has_gradient = False
        """If it is false, the gradient's buffers are zero."""

        self.adamw: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.max_grad_norm,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                overlap_param_gather=config.overlap_param_gather,
            ),
            chunks,  # type: ignore[arg-type]
            use_gloo_process_groups=False,
        )
        self.parts: list[DistributedOptimizer] = [
            part for part in self.adamw.chained_optimizers if not part.is_stub_optimizer
        ]
        self.owner = {
            parameter: part for part in self.parts for parameter in part.model_param_group_index_map
        }

        # Allocated now, so that a checkpoint can be read into a fresh optimizer.
        for part in self.parts:
            _allocate(part.optimizer)

    def norm(self) -> float:
        """Return the L2 norm of the whole gradient over all ranks."""
        self.adamw.prepare_grads()
        return float(self.adamw.get_grad_norm())

    def step(self, norm: float) -> StepResult:
        """Clip, apply and clear the gradient, which has this norm.

        A gradient that is not finite changes nothing, on all ranks alike.
        """
        lr = self.config.lr * self.multiplier(self.num_steps)
        applied = math.isfinite(norm)
        if applied:
            for part in self.parts:
                for group in part.optimizer.param_groups:
                    group["lr"] = lr
                    group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
                if self.config.max_grad_norm:
                    parameters: list[Tensor] = [*part.get_parameters()]
                    clip_grad_by_total_norm_fp32(parameters, self.config.max_grad_norm, norm)
            self.adamw.step_with_ready_grads()
            self.num_steps += 1

        self.clear()
        return StepResult(applied, norm, lr)

    def clear(self) -> None:
        """Forget the gradient."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.adamw.zero_grad()
        self.has_gradient = False

    def whole(self, parameter: nn.Parameter, state: str) -> Tensor:
        """Return a state of a parameter in the parameter's shape, in fp32.

        The states are "param", "exp_avg", "exp_avg_sq" and "grad". It is collective
        over the parameter's ranks.
        """
        if not parameter.requires_grad and state == "param":
            return parameter.float()
        start, end, local = self._shard(parameter, state)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if local is not None:
            whole[start:end] = local
        # Megatron marks parameters that expert-parallel ranks split.
        expert = not getattr(parameter, "allreduce", True)
        group = groups.expert_data() if expert else groups.data()

        # Every other rank adds zeros, so that not a bit changes.
        if group.size() > 1:
            dist.all_reduce(whole.view(torch.int32), group=group)
        return whole.view(parameter.shape)

    def put(self, parameter: nn.Parameter, state: str, whole: Tensor) -> None:
        """Undo :meth:`whole` on one rank."""
        if not parameter.requires_grad and state == "param":
            parameter.data.copy_(whole)
        start, end, local = self._shard(parameter, state)
        if local is not None:
            local.copy_(whole.reshape(-1)[start:end])

    def _shard(self, parameter: nn.Parameter, state: str) -> tuple[int, int, Tensor | None]:
        """Return this rank's range of the flat parameter, and its part of the state."""
        part = self.owner.get(parameter)
        if part is None:
            return 0, 0, None
        where = part._get_model_param_range_map(parameter)["param"]
        start, end = where.start, where.end
        if state == "grad":
            return start, end, parameter.main_grad.reshape(-1)[start:end]  # type: ignore[attr-defined]
        return start, end, part._get_main_param_and_optimizer_states(parameter)[state].detach()

    def gather(self) -> None:
        """Bring the weights of the last step together now.

        With ``overlap_param_gather`` they would come in the next forward pass.
        """
        if self.config.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def gradients(self) -> Iterator[Tensor]:
        """Yield the buffers of all gradients."""
        for chunk in self.chunks:
            # No method here, whatever its type says.
            every: list[Any] = [*chunk.buffers, *chunk.expert_parallel_buffers]  # type: ignore[misc]
            yield from (buffer.grad_data for buffer in every)

    def states(self) -> Iterator[Tensor]:
        """Yield AdamW's moments, and the fp32 copies of half-precision parameters."""
        for part in self.parts:
            for group in part.shard_fp32_from_float16_groups:
                yield from group
            for state in part.optimizer.state.values():
                yield from (state["exp_avg"], state["exp_avg_sq"])

    def resume(self, num_steps: int) -> None:
        """Continue after so many steps. The states are in place already."""
        self.num_steps = num_steps
        for part in self.parts:
            for group in part.optimizer.param_groups:
                # Transformer Engine's AdamW counts once for a group.
                if not isinstance(part.optimizer, torch.optim.AdamW):
                    group["step"] = num_steps
                    continue
                for parameter in group["params"]:
                    part.optimizer.state[parameter]["step"].fill_(num_steps)
            part._copy_main_params_to_model_params()

        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)


def _allocate(adamw: torch.optim.Optimizer) -> None:
    for group in adamw.param_groups:
        for parameter in group["params"]:
            state = adamw.state[parameter]
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if isinstance(adamw, torch.optim.AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32)
