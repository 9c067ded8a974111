"""AdamW over the local shards, with global clipping and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from coupler import schedules
from coupler.interfaces import StepResult
from coupler_engine_fsdp.config import FSDPConfig, Schedule


class Optimizer:
    """AdamW (arXiv 1711.05101) of this rank's rows of every parameter.

    It works on plain tensors: AdamW is elementwise, and a DTensor costs more to dispatch than a small update.
    """

    def __init__(self, config: FSDPConfig, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self.config, self.parameters, self.mesh = config, parameters, mesh
        self.multiplier = _multiplier(config)
        self.num_steps = 0  # applied
        self.shards = {name: _shard(parameter) for name, parameter in parameters.items()}
        groups = [
            {"params": [p for p in self.shards.values() if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self.shards.values() if p.ndim < 2], "weight_decay": 0.0},  # biases and norms
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for shard in self.shards.values():  # allocated now, so that a checkpoint can be read into a fresh optimizer
            self.adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                "exp_avg": torch.zeros_like(shard, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(shard, requires_grad=False),
            }

    def step(self, norm: float) -> StepResult:
        """Clip, apply and clear the gradient, of this norm. A non-finite one changes nothing, on all ranks alike."""
        self._take_gradients()
        lr = self.config.lr * self.multiplier(self.num_steps)
        applied = math.isfinite(norm)
        if applied:
            if 0 < self.config.max_grad_norm < norm:
                grads = [shard.grad for shard in self.shards.values() if shard.grad is not None]
                torch._foreach_mul_(grads, self.config.max_grad_norm / norm)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.num_steps += 1
        for name, shard in self.shards.items():
            shard.grad = self.parameters[name].grad = None
        return StepResult(applied, norm, lr)

    def norm(self) -> Tensor:
        """L2 norm of the whole gradient, on the device: each shard counts once, however many replicas hold it."""
        self._take_gradients()
        grads = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(1, device=self.mesh.device_type)
        total = torch.linalg.vector_norm(norms).square()
        for axis in range(self.mesh.ndim if self.mesh.size() > 1 else 0):
            dist.all_reduce(total, group=self.mesh.get_group(axis))
        return (total * (self.mesh.size(-1) / self.mesh.size())).sqrt()

    def _take_gradients(self) -> None:
        for name, shard in self.shards.items():
            parameter = self.parameters[name]
            if shard is not parameter:
                shard.grad = None if parameter.grad is None else _local(parameter.grad)

    def state(self) -> dict[str, Tensor]:
        """Adam's tensors by parameter name, shaped and sharded like the parameters."""
        tensors: dict[str, Tensor] = {}
        for name, shard in self.shards.items():
            state = self.adamw.state[shard]
            tensors[f"{name}/step"] = state["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{name}/{key}"] = _like(state[key], self.parameters[name])
        return tensors

    def to(self, device: torch.device | None) -> None:
        """Follow the parameters, and move Adam's tensors where a device is given."""
        for name, shard in self.shards.items():
            if shard is not self.parameters[name]:
                shard.data = _local(self.parameters[name])
            if device is not None:
                self.adamw.state[shard] = {key: value.to(device) for key, value in self.adamw.state[shard].items()}


def _shard(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_local(parameter)) if isinstance(parameter, DTensor) else parameter


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(local: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _multiplier(config: FSDPConfig) -> partial[float]:
    warmup, tail = {"warmup": config.warmup_steps}, {"total": config.total_steps, "floor": config.min_lr_ratio}
    match config.schedule:
        case Schedule.CONSTANT:
            return partial(schedules.constant, **warmup)
        case Schedule.LINEAR:
            return partial(schedules.linear, **warmup, **tail)
        case Schedule.COSINE:
            return partial(schedules.cosine, **warmup, **tail)
        case Schedule.WSD:
            return partial(schedules.wsd, **warmup, **tail, decay=config.decay_steps)
