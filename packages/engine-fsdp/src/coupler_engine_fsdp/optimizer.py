"""Run the optimizer over local shards, with clipping and a learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from coupler.engine_kit.adamw import multiplier
from coupler.interfaces import StepResult
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.masters import Masters
from coupler_engine_fsdp.muon import Muon

MOMENTS = ("exp_avg", "exp_avg_sq")
# Moments start at multiples of so many numbers in their storage.
ALIGNED = 128


class Optimizer:
    """AdamW (arXiv 1711.05101) of this rank's rows of every parameter, but for those
    that Muon trains.

    It works on plain tensors: AdamW is elementwise, and a DTensor costs more to
    dispatch than a small update.
    """

    def __init__(
        self,
        config: FSDPConfig,
        parameters: Mapping[str, nn.Parameter],
        masters: Masters,
        mesh: DeviceMesh,
        muon: Collection[str] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the state.

        Args:
            muon: names of the matrices that Muon trains.
            dtype: that of Muon's products.
        """
        self.config, self.parameters, self.masters, self.mesh = config, parameters, masters, mesh
        self.multiplier = multiplier(config)
        self.num_steps = 0
        """Steps that were applied."""
        self.shards = {name: _shard(parameter) for name, parameter in parameters.items()}

        self.muon: Muon | None = None
        if muon:
            matrices = {name: self.shards[name] for name in muon}
            shapes = {name: parameters[name].shape for name in muon}
            self.muon = Muon(config, matrices, shapes, mesh, dtype)

        # Biases and norms do not decay.
        self.elementwise = {n: shard for n, shard in self.shards.items() if n not in muon}
        matrices = [p for p in self.elementwise.values() if p.ndim > 1]
        vectors = [p for p in self.elementwise.values() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

        # Allocated now, so that a checkpoint can be read into a fresh optimizer.
        shards = [*self.elementwise.values()]
        for shard, mean, square in zip(shards, _zeros(shards), _zeros(shards), strict=True):
            step = torch.zeros((), dtype=torch.float32, device=shard.device)
            self.adamw.state[shard] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}

    def step(self, norm: float) -> StepResult:
        """Clip, apply and clear the gradient, which has this norm.

        A gradient that is not finite changes nothing, on all ranks alike.
        """
        lr = self.config.lr * self.multiplier(self.num_steps)
        applied = math.isfinite(norm)
        if applied:
            limit = self.config.max_grad_norm
            scale = limit / norm if 0 < limit < norm else 1.0
            fused = self.masters.pairs and self.mesh.device_type == "cuda" and not self.muon
            if fused and find_spec("triton"):
                self._update_in_one_pass(lr, scale)
            else:
                self._update(lr, scale)
            self.num_steps += 1

        self.masters.clear()
        for name, shard in self.shards.items():
            shard.grad = self.parameters[name].grad = None
        return StepResult(applied, norm, lr)

    def _update(self, lr: float, scale: float) -> None:
        self.masters.settle()
        self._take_gradients()
        if scale != 1:
            grads = [shard.grad for shard in self.shards.values() if shard.grad is not None]
            torch._foreach_mul_(grads, scale)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()

        if self.muon:
            self.muon.step(lr)
        self.masters.refresh()

    def _update_in_one_pass(self, lr: float, scale: float) -> None:
        """Do the work of :meth:`_update` in one pass.

        Memory is read and written once for clipping, AdamW and the copies together.
        """
        from coupler_engine_fsdp.adamw_triton import adamw

        beta1, beta2, eps = self.config.beta1, self.config.beta2, self.config.eps
        for shard in self.shards.values():
            grad, state = self.masters.gradient_of(shard), self.adamw.state[shard]
            if grad is not None:
                adamw(
                    shard.detach(),
                    grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    self.masters.copy_of(shard).detach(),
                    step=self.num_steps + 1,
                    lr=lr,
                    beta1=beta1,
                    beta2=beta2,
                    eps=eps,
                    decay=self.config.weight_decay if shard.ndim > 1 else 0.0,
                    scale=scale,
                )
        torch._foreach_add_([self.adamw.state[shard]["step"] for shard in self.shards.values()], 1)

    def norm(self) -> Tensor:
        """Return the L2 norm of the whole gradient, on the device.

        Each shard counts once, however many replicas hold it.
        """
        self._take_gradients()
        grads = [
            grad
            for shard in self.shards.values()
            if (grad := self.masters.gradient_of(shard)) is not None
        ]
        norms = torch._foreach_norm(grads, dtype=torch.float32) or [
            torch.zeros((), device=self.mesh.device_type)
        ]

        total = torch.linalg.vector_norm(torch.stack(norms)).square()
        for axis in range(self.mesh.ndim if self.mesh.size() > 1 else 0):
            dist.all_reduce(total, group=self.mesh.get_group(axis))
        return (total * (self.mesh.size(-1) / self.mesh.size())).sqrt()

    def _take_gradients(self) -> None:
        for name, shard in self.shards.items():
            parameter = self.parameters[name]
            if shard is not parameter:
                shard.grad = None if parameter.grad is None else local(parameter.grad)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by parameter name, shaped and sharded like the
        parameters.
        """
        tensors: dict[str, Tensor] = {}
        for name, momentum in self.muon.momentum.items() if self.muon else ():
            tensors[f"{name}/momentum"] = _like(momentum, self.parameters[name])

        for name, shard in self.elementwise.items():
            state = self.adamw.state[shard]
            tensors[f"{name}/step"] = state["step"]
            for key in MOMENTS:
                tensors[f"{name}/{key}"] = _like(state[key], self.parameters[name])
        return tensors

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the state that have the size of parameters."""
        states = (self.adamw.state[shard] for shard in self.elementwise.values())
        moments = [state[key] for state in states for key in MOMENTS]
        return [*moments, *(self.muon.momentum.values() if self.muon else ())]


def _zeros(shards: Sequence[Tensor]) -> list[Tensor]:
    """Return fp32 zeros like each of ``shards``, in one storage.

    A GPU takes as long to free hundreds of storages as to copy gigabytes.
    """
    sizes = [-(-shard.numel() // ALIGNED) * ALIGNED for shard in shards]
    device = shards[0].device if shards else None
    pieces = torch.zeros(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    pairs = zip(pieces, shards, strict=True)
    return [piece[: shard.numel()].view(shard.shape) for piece, shard in pairs]


def _shard(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local(parameter)) if isinstance(parameter, DTensor) else parameter


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, without its gradient."""
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
