"""Train low-rank updates of the layers' linear maps (LoRA, arXiv 2106.09685).

The maps' own weights stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from coupler.engine_kit.lora import LoRAConfig
from coupler.engine_kit.lora_names import names_of
from coupler.engine_kit.peft_folder import Start
from coupler.interfaces import Named, Rank
from coupler_engine_fsdp.value import ValueHead
from coupler_engine_fsdp.weights import rows_of, whole

A, B = "lora_A", "lora_B"


class LoRALinear(nn.Linear):
    """Linear map ``W x + scale * B A x`` (equation 3).

    A [rank, in] and B [out, rank] are trained. W and its bias are not.
    """

    def __init__(
        self,
        old: nn.Linear,
        adapter: Adapter,
    ) -> None:
        kind = {"device": "meta", "dtype": torch.float32}
        super().__init__(old.in_features, old.out_features, old.bias is not None, **kind)
        self.requires_grad_(False)
        self.adapter = adapter
        self.lora_A = nn.Parameter(torch.empty(adapter.rank, self.in_features, **kind))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, adapter.rank, **kind))

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        if not self.adapter.on:
            return out
        return out + linear(linear(input, self.lora_A), self.lora_B) * self.adapter.scale

    def merged(
        self,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
    ) -> Tensor:
        """Return this rank's rows of ``W + scale * B A``. It is collective if A is
        sharded.
        """
        full = whole(a)
        if not isinstance(weight, DTensor) or not isinstance(b, DTensor):
            return weight.detach() + self.adapter.scale * (b.detach() @ full)
        # W and B are cut at the same rows.
        local = weight.to_local() + self.adapter.scale * (b.to_local() @ full)
        return DTensor.from_local(
            local.detach(),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )


class Adapter:
    """The low-rank updates of one model. There are none at rank 0."""

    def __init__(self, config: LoRAConfig) -> None:
        self.config, self.rank, self.on = config, config.lora_rank, True
        self.scale = config.lora_alpha / self.rank if self.rank else 0.0
        # By the module's name, and by the checkpoint's name.
        self.linears: dict[str, LoRALinear] = {}
        self.updates: dict[str, tuple[LoRALinear, nn.Parameter, nn.Parameter]] = {}

    def insert(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
    ) -> None:
        """Replace the targeted linear maps in ``layers``, on meta.

        Only their updates, and a value head, are trained.

        Raises:
            ConfigError: a target names no linear map.
        """
        for module in model.modules():
            if not isinstance(module, ValueHead):
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)

        inside = {id(module) for layer in layers for module in layer.modules()}
        linears = {
            name: module
            for name, module in model.named_modules()
            if id(module) in inside and type(module) is nn.Linear
        }
        self.config.check_targets(linears)
        for name, module in linears.items():
            if self.config.targets(name):
                self.linears[name] = LoRALinear(module, self)
                model.set_submodule(name, self.linears[name])

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return A and B of every linear map, by name."""
        return {
            f"{name}.{key}": getattr(m, key) for name, m in self.linears.items() for key in (A, B)
        }

    @torch.no_grad()
    def start(
        self,
        rank: Rank,
        device: torch.device,
    ) -> None:
        """Set A and B to what training starts from, equal on any number of ranks.

        Raises:
            CouplerError: ``engine.lora_adapter_path`` does not fit the model.
        """
        seed = torch.tensor(rank.seed % 2**62, device=device)
        if rank.world > 1:
            dist.broadcast(seed, 0)
        start = Start(
            self.config,
            self.updates,
            int(seed),
        )

        for name, (module, *parts) in self.updates.items():
            for target, drawn in zip(
                parts,
                start.pair(name, module.weight.shape),
                strict=True,
            ):
                if isinstance(target, DTensor):
                    rows = rows_of(target)
                    target.to_local().copy_(drawn[rows.start : rows.stop])
                else:
                    target.copy_(drawn)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute as it did before training, within the context."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def bind(self, named: Mapping[str, Tensor]) -> None:
        """Find the updates of each tensor of a checkpoint.

        It is called while modules still hold the tensors themselves.
        """
        owners = {id(module.weight): module for module in self.linears.values()}
        found = ((name, owners.get(id(tensor))) for name, tensor in named.items())
        self.updates = {name: (m, m.lora_A, m.lora_B) for name, m in found if m is not None}

    def merge(self, named: Mapping[str, Tensor]) -> Iterator[Named]:
        """Yield the tensors of :meth:`bind` with their updates added, one at a time."""
        for name, tensor in named.items():
            module, *parts = self.updates.get(name, (None,))
            yield name, module.merged(tensor, *parts) if module is not None else tensor

    def apart(self) -> Iterator[Named]:
        """Yield A and ``scale * B`` of the tensors of :meth:`bind`.

        Their names are those of :mod:`coupler.engine_kit.lora_names`.
        """
        for name, (_, a, b) in self.updates.items():
            yield from zip(
                names_of(name),
                (a.detach(), b.detach() * self.scale),
                strict=True,
            )

    def names(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Map the names of ``tensors`` to those that every engine knows.

        They are the same but for A and B, which :meth:`apart` names.
        """
        known = {
            id(tensor): name
            for weight, (_, *parts) in self.updates.items()
            for name, tensor in zip(
                names_of(weight),
                parts,
                strict=True,
            )
        }
        return {name: known.get(id(tensor), name) for name, tensor in tensors.items()}
