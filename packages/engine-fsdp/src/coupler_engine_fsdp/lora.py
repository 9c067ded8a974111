"""Train low-rank updates of the layers' linear maps (LoRA, arXiv 2106.09685).

The maps' own weights stay as they were. Experts are adapted in
:mod:`coupler_engine_fsdp.lora_experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from coupler.engine_kit.lora import LoRAConfig
from coupler.engine_kit.lora_names import names_of
from coupler.engine_kit.peft_folder import Start
from coupler.interfaces import Named, Rank
from coupler_engine_fsdp.lora_experts import PARTS, LoRAExperts, holds_experts
from coupler_engine_fsdp.value import ValueHead
from coupler_engine_fsdp.weights import Experts, Place, like, local, rows_of, whole

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
        super().__init__(
            old.in_features,
            old.out_features,
            old.bias is not None,
            **kind,
        )
        self.requires_grad_(False)
        self.adapter = adapter

        self.lora_A = nn.Parameter(
            torch.empty(
                adapter.rank,
                self.in_features,
                **kind,
            )
        )
        self.lora_B = nn.Parameter(
            torch.empty(
                self.out_features,
                adapter.rank,
                **kind,
            )
        )

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
        # W and B are cut at the same rows.
        update = local(b) @ whole(a).detach()

        return like(update.mul_(self.adapter.scale).add_(local(weight)), weight)


@dataclass(frozen=True, slots=True)
class Stack:
    """The updates of a parameter that holds a matrix of all experts of a layer.

    Attributes:
        key: the parameter's name in its module.
        shape: that of the parameter.
        pairs: A and B by the matrix that they are for.
        places: the matrix and the place of each expert's, by its name in the
            checkpoint.
    """

    layer: LoRAExperts
    key: str
    shape: torch.Size
    pairs: dict[str, tuple[Tensor, Tensor]]
    places: dict[str, tuple[str, Place]]

    @classmethod
    def of(
        cls, layer: LoRAExperts, key: str, shape: torch.Size, places: Mapping[str, Place]
    ) -> Stack:
        named = {
            name: (name.removesuffix(".weight").rpartition(".")[2], place)
            for name, place in places.items()
        }

        return cls(
            layer,
            key,
            shape,
            {part: layer.pair(part) for part in PARTS[key]},
            named,
        )


class Adapter:
    """The low-rank updates of one model. There are none at rank 0."""

    def __init__(self, config: LoRAConfig) -> None:
        self.config, self.rank, self.on = config, config.lora_rank, True
        self.scale = config.lora_alpha / self.rank if self.rank else 0.0
        # By the module's name, and by the checkpoint's name.
        self.linears: dict[str, LoRALinear] = {}
        self.updates: dict[str, tuple[LoRALinear, nn.Parameter, nn.Parameter]] = {}
        self.layers: dict[str, LoRAExperts] = {}
        self.stacks: dict[str, Stack] = {}
        # Places of the experts' A and B in their parameters, by the names of these.
        self.experts: dict[str, dict[str, Place]] = {}

    def insert(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
    ) -> None:
        """Replace the targeted linear maps in ``layers``, on meta, and adapt experts.

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
        experts = {
            name: module
            for name, module in model.named_modules()
            if id(module) in inside and holds_experts(module)
        }
        self.config.check_targets([*linears, *experts])

        for name, module in experts.items():
            if self.config.targets(name):
                self.layers[name] = LoRAExperts(module, self)
        for name, module in linears.items():
            if self.config.targets(name):
                self.linears[name] = LoRALinear(module, self)
                model.set_submodule(name, self.linears[name])

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return A and B of linear maps, and of all experts of a layer, by name."""
        linears = {
            f"{name}.{key}": getattr(m, key) for name, m in self.linears.items() for key in (A, B)
        }
        experts = {
            f"{name}.{key}": parameter
            for name, layer in self.layers.items()
            for key, parameter in layer.parameters()
        }
        return linears | experts

    def weights(self) -> Iterator[Tensor]:
        """Yield what updates are added to: weights, and those of all experts of a
        layer.
        """
        yield from (module.weight for module in self.linears.values())
        for layer in self.layers.values():
            yield from (getattr(layer.module, key) for key in PARTS)

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
        of_experts = [name for stack in self.stacks.values() for name in stack.places]
        start = Start(
            self.config,
            [*self.updates, *of_experts],
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

        for stack in self.stacks.values():
            for name, (part, place) in stack.places.items():
                shape = place.of(torch.empty(stack.shape, device="meta")).shape
                drawn = start.pair(name, tuple(shape))
                for target, values in zip(
                    stack.pairs[part],
                    drawn,
                    strict=True,
                ):
                    if (held := Place(place.expert, None).held(target)) is not None:
                        held.copy_(values)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute as it did before training, within the context."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def bind(
        self,
        named: Mapping[str, Tensor],
        experts: Experts,
    ) -> None:
        """Find the updates of each tensor of a checkpoint.

        It is called while modules still hold the tensors themselves.

        Args:
            experts: the experts in parameters that hold those of a layer.
        """
        owners = {id(module.weight): module for module in self.linears.values()}
        found = ((name, owners.get(id(tensor))) for name, tensor in named.items())
        self.updates = {name: (m, m.lora_A, m.lora_B) for name, m in found if m is not None}

        for name, places in experts.items():
            module, _, key = name.rpartition(".")
            layer = self.layers.get(module)
            if layer is None:
                continue
            stack = Stack.of(
                layer,
                key,
                named[name].shape,
                places,
            )
            self.stacks[name] = stack
            for part in stack.pairs:
                for which, end in enumerate((A, B)):
                    self.experts[f"{module}.{end}_{part}"] = {
                        names_of(weight)[which]: Place(place.expert, None)
                        for weight, (its, place) in stack.places.items()
                        if its == part
                    }

    def merge(self, named: Mapping[str, Tensor]) -> Iterator[Named]:
        """Yield the tensors of :meth:`bind` with their updates added, one at a time."""
        for name, tensor in named.items():
            if stack := self.stacks.get(name):
                yield name, stack.layer.merged(stack.key, tensor)
                continue
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

        for stack in self.stacks.values():
            for part, pair in stack.pairs.items():
                a, b = map(whole, pair)
                for weight, (its, place) in stack.places.items():
                    if its == part:
                        tensors = a[place.expert], b[place.expert] * self.scale
                        yield from zip(
                            names_of(weight),
                            tensors,
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
