"""Run the optimizer over local shards, with clipping and a learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from coupler.engine_kit.adamw import multiplier
from coupler.engine_kit.parked import Parked
from coupler.interfaces import StepResult
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.masters import Masters
from coupler_engine_fsdp.moments import Moments
from coupler_engine_fsdp.muon import Muon
from coupler_engine_fsdp.weights import like, local


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
        blocks: Mapping[str, int] | None = None,
        parked: Parked | None = None,
        leaving: Collection[str] = (),
    ) -> None:
        """Allocate the state.

        Args:
            muon: names of the matrices that Muon trains.
            dtype: that of Muon's products.
            blocks: numbers that share a scale, of each weight whose moments have 8
                bits.
            parked: the host memory of moments that are on the device in a step alone.
            leaving: master weights that leave the device with their moments.
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
            self.muon = Muon(
                config,
                matrices,
                shapes,
                mesh,
                dtype,
            )

        self.elementwise = {n: shard for n, shard in self.shards.items() if n not in muon}
        self.moments = Moments(
            config,
            self.elementwise,
            blocks,
            parked,
            leaving,
        )

    def step(self, norm: float) -> StepResult:
        """Clip, apply and clear the gradient, which has this norm.

        A gradient that is not finite changes nothing, on all ranks alike.
        """
        lr = self.config.lr * self.multiplier(self.num_steps)
        applied = math.isfinite(norm)
        if applied:
            limit = self.config.max_grad_norm
            scale = limit / norm if 0 < limit < norm else 1.0
            plain = not self.muon and not self.moments.eight
            fused = self.masters.pairs and self.mesh.device_type == "cuda" and plain
            if fused and find_spec("triton"):
                self._update_in_one_pass(lr, scale)
            else:
                self._update(lr, scale)
            self.num_steps += 1

        self.masters.clear()
        self._clear(self.shards)
        return StepResult(
            applied,
            norm,
            lr,
        )

    def _update(
        self,
        lr: float,
        scale: float,
    ) -> None:
        for piece in self.moments.in_turn():
            self._bring_gradients(piece.shards, scale)
            self.moments.advance(piece, lr)
            self.masters.refresh(piece.shards.values())
            self._clear(piece.shards)

        if self.muon:
            self._bring_gradients(self.muon.shards, scale)
            self.muon.step(lr)
            self.masters.refresh(self.muon.shards.values())

    def _bring_gradients(
        self,
        shards: Mapping[str, Tensor],
        scale: float,
    ) -> None:
        """Give shards their gradients in fp32, multiplied with ``scale``."""
        self.masters.settle(shards.values())
        self._take_gradients(shards)
        if scale != 1:
            grads = [shard.grad for shard in shards.values() if shard.grad is not None]
            torch._foreach_mul_(grads, scale)

    def _clear(self, names: Iterable[str]) -> None:
        for name in names:
            self.shards[name].grad = self.parameters[name].grad = None

    def _update_in_one_pass(
        self,
        lr: float,
        scale: float,
    ) -> None:
        """Do the work of :meth:`_update` in one pass.

        Memory is read and written once for clipping, AdamW and the copies together.
        """
        from coupler_engine_fsdp.adamw_triton import adamw

        for piece in self.moments.in_turn():
            states = [piece.adamw.state[shard] for shard in piece.shards.values()]
            for shard, state in zip(
                piece.shards.values(),
                states,
                strict=True,
            ):
                self._update_shard(
                    adamw,
                    shard,
                    state,
                    lr,
                    scale,
                )
            torch._foreach_add_([state["step"] for state in states], 1)

    def _update_shard(
        self,
        adamw: Callable[..., None],
        shard: Tensor,
        state: Mapping[str, Tensor],
        lr: float,
        scale: float,
    ) -> None:
        grad = self.masters.gradient_of(shard)

        if grad is not None:
            adamw(
                shard.detach(),
                grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                self.masters.copy_of(shard).detach(),
                step=self.num_steps + 1,
                lr=lr,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                eps=self.config.eps,
                decay=self.config.weight_decay if shard.ndim > 1 else 0.0,
                scale=scale,
            )

    def norm(self) -> Tensor:
        """Return the L2 norm of the whole gradient, on the device.

        Each shard counts once, however many replicas hold it.
        """
        self._take_gradients(self.shards)
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

    def _take_gradients(self, shards: Mapping[str, Tensor]) -> None:
        for name, shard in shards.items():
            parameter = self.parameters[name]
            if shard is not parameter:
                shard.grad = None if parameter.grad is None else local(parameter.grad)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors as a checkpoint has them, by parameter name.

        All but steps and maps are sharded like the parameters.
        """
        tensors: dict[str, Tensor] = {**self.moments.maps()}
        for name, momentum in self.muon.momentum.items() if self.muon else ():
            tensors[f"{name}/momentum"] = like(momentum, self.parameters[name])

        for name in self.elementwise:
            for key, tensor in self.moments.state(name).items():
                one = not tensor.ndim
                tensors[f"{name}/{key}"] = tensor if one else like(tensor, self.parameters[name])
        return tensors

    def moments_of(self) -> dict[str, Tensor]:
        """Return both moments of every parameter and its steps, which a checkpoint of
        any precision fills.
        """
        tensors: dict[str, Tensor] = {}
        for name in self.elementwise:
            tensors[f"{name}/step"] = self.moments.state(name)["step"]
            for key, moment in self.moments.moments(name).items():
                tensors[f"{name}/{key}"] = like(moment, self.parameters[name])
        return tensors

    def tensors(self) -> list[Tensor]:
        """Return what is on the device between steps, of the size of parameters."""
        momentum = self.muon.momentum.values() if self.muon else ()
        return [*self.moments.on_device(), *momentum]


def _shard(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local(parameter)) if isinstance(parameter, DTensor) else parameter
