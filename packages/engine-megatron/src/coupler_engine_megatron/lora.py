"""Train low-rank updates of Megatron's linear maps (LoRA, arXiv 2106.09685).

Megatron fuses linear maps of a checkpoint: queries, keys and values are one, a gate and
an up are one. Each keeps its own A. Those of one fused map stand above each other in
``lora_A`` [k r, in], and ``lora_B`` [out, r] has the rows of all of them in the order
of the fused map's rows. Experts are adapted in
:mod:`coupler_engine_megatron.lora_experts`.

Shapes: k maps of the checkpoint, r rank, t tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot

from coupler.engine_kit.lora_names import B, weight_of
from coupler.engine_kit.peft_folder import Start
from coupler.interfaces import Named
from coupler_engine_megatron import lora_tensors as hf
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.distributed import exchange
from coupler_engine_megatron.experts import GroupedLinear
from coupler_engine_megatron.folder import Folder
from coupler_engine_megatron.head import ValueHead
from coupler_engine_megatron.lora_experts import ExpertsUpdate
from coupler_engine_megatron.weights import Catalogue, global_name

# Megatron sums the gradients of parameters with it over tensor-parallel ranks.
SEQUENCE_PARALLEL = "sequence_parallel"


class Update:
    """The update of one linear map, ``scale * E A x`` (equation 3).

    E [out, k r] is B with each row at the columns of its own A. One map of a checkpoint
    has E = B.
    """

    def __init__(
        self,
        adapter: Adapter,
        module: Any,
        name: str,
        maps: Sequence[str],
    ) -> None:
        """Give ``module`` its A and B, and add their product to what it returns.

        Args:
            name: the name of its weight in the whole model.
            maps: names of the checkpoint's weights that it is made of.
        """
        self.adapter, self.module = adapter, module
        weight = module.weight
        self.column = isinstance(module, ColumnParallelLinear)
        self.sequence_parallel = module.sequence_parallel
        of = hf.rows_of_maps(
            adapter.bridge,
            name,
            weight.shape[0],
        ).to(weight.device)
        # [out, k], 1 where a row is of a map.
        self.rows = one_hot(of, len(maps)).to(weight.dtype)

        kind = {"device": weight.device, "dtype": weight.dtype}
        a = nn.Parameter(torch.zeros(len(maps) * adapter.rank, weight.shape[1], **kind))
        b = nn.Parameter(torch.zeros(weight.shape[0], adapter.rank, **kind))
        # A of a column-parallel map and B of a row-parallel one are whole on each rank.
        for parameter, split, dim in ((a, not self.column, 1), (b, self.column, 0)):
            set_tensor_model_parallel_attributes(
                parameter,
                split,
                dim if split else -1,
                1,
            )
            if not split:
                setattr(parameter, SEQUENCE_PARALLEL, self.sequence_parallel)
        module.register_parameter("lora_A", a)
        module.register_parameter("lora_B", b)
        module.register_forward_hook(self._add)

    def _add(
        self,
        module: Any,
        inputs: tuple[Any, ...],
        found: Any,
    ) -> Any:
        """Add the update to the map's output. Its bias, which follows, stays."""
        if not self.adapter.on:
            return None
        output, *rest = found
        hidden = self._across(linear(inputs[0], module.lora_A))
        return output + linear(hidden, self.expanded()) * self.adapter.scale, *rest

    def _across(self, hidden: Tensor) -> Tensor:
        """Bring [t, 1, k r] to the tokens and the sum that the output is of."""
        if self.column and self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        if self.column:
            return copy_to_tensor_model_parallel_region(hidden)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden)
        return reduce_from_tensor_model_parallel_region(hidden)

    def expanded(self) -> Tensor:
        """Return E [out, k r]."""
        return hf.expand(self.module.lora_B, self.rows)

    def merged(self) -> Tensor:
        """Return this rank's part of ``W + scale * E A``, in fp32."""
        update = self.expanded().float() @ self.module.lora_A.float()
        return self.module.weight.float() + self.adapter.scale * update


class Adapter:
    """The low-rank updates of this rank's parts of a model, none at rank 0."""

    def __init__(
        self,
        config: MegatronConfig,
        bridge: Any,
    ) -> None:
        self.config, self.bridge, self.on = config, bridge, True
        self.rank = config.lora_rank
        self.scale = config.lora_alpha / self.rank if self.rank else 0.0
        # What adds the update to a weight, by the id of the weight.
        self.merges: dict[int, Callable[[], Tensor]] = {}

    def insert(self, chunks: Sequence[Any]) -> None:
        """Give the targeted linear maps of the layers an update.

        Only the updates, and a value head, are trained.

        Raises:
            ConfigError: a target names no linear map.
        """
        linears = list(_linears(chunks))
        maps = [hf.hf_names(self.bridge, name) for _, name in linears]
        own = sorted({hf.target_of(each) for names in maps for each in names})
        # A target may name a layer of another pipeline stage.
        self.config.check_targets({each for found in exchange(own) for each in found})

        for chunk in chunks:
            _freeze(chunk)
        for (module, name), names in zip(
            linears,
            maps,
            strict=True,
        ):
            if any(map(self._targets, names)):
                self._adapt(module, name, names)

    def _adapt(
        self,
        module: Any,
        name: str,
        maps: Sequence[str],
    ) -> None:
        """Give a linear map, or that of all experts of a layer, an update."""
        if not isinstance(module, GroupedLinear):
            self.merges[id(module.weight)] = Update(self, module, name, maps).merged
            return
        update = ExpertsUpdate(self, module, name, len(maps))
        for number in range(module.experts):
            weight = getattr(module, f"weight{number}")
            self.merges[id(weight)] = partial(update.merged, number)

    def _targets(self, weight: str) -> bool:
        """Tell if a weight gets an update, by its name in the checkpoint."""
        return self.config.targets(hf.target_of(weight))

    def merged(self, parameter: nn.Parameter) -> Tensor:
        """Return a weight with its update, if it has one."""
        merge = self.merges.get(id(parameter))
        return parameter if merge is None else merge()

    def start(
        self, trained: Catalogue, folder: Folder, seed: int
    ) -> Callable[[str], Tensor | None]:
        """Return what reads the A and B that training starts from.

        Raises:
            CouplerError: ``engine.lora_adapter_path`` does not fit the model.
        """
        weights = {weight for name in trained.names() if (weight := weight_of(name))}
        self.shapes = {weight: folder.shape(weight) for weight in weights}
        start = Start(
            self.config,
            [w for w in weights if self._targets(w)],
            seed,
        )

        def read(name: str) -> Tensor | None:
            weight = weight_of(name)
            if weight is None:
                return None
            return start.pair(weight, self.shapes[weight])[name.endswith(B)]

        return self.reading(read)

    def reading(self, read: Callable[[str], Tensor | None]) -> Callable[[str], Tensor | None]:
        """Return ``read`` with zeros for A and B of maps that are not targeted.

        They are in a parameter because a map that is fused with theirs is targeted.
        They stay zero: their gradient is.
        """

        def of(name: str) -> Tensor | None:
            weight = weight_of(name)
            if weight is None or self._targets(weight):
                return read(name)
            rows, columns = self.shapes[weight]
            shape = (rows, self.rank) if name.endswith(B) else (self.rank, columns)
            return torch.zeros(shape)

        return of

    def targeted(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Leave out A and B of maps that are not targeted."""
        for name, tensor in tensors:
            weight = weight_of(name)
            if weight is None or self._targets(weight):
                yield name, tensor

    def apart(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Yield A and ``scale * B`` of the targeted maps among ``tensors``."""
        for name, tensor in self.targeted(tensors):
            if weight_of(name):
                yield name, tensor * self.scale if name.endswith(B) else tensor

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute as it did before training, within the context."""
        self.on = False
        try:
            yield
        finally:
            self.on = True


def _linears(chunks: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the linear maps of the layers, with the names of their weights in the whole
    model. Experts' maps have the name of the first expert's.
    """
    for chunk in chunks:
        for path, module in chunk.named_modules():
            grouped = isinstance(module, GroupedLinear)
            if grouped or isinstance(module, ColumnParallelLinear | RowParallelLinear):
                name = global_name(chunk, f"{path}.weight{'0' if grouped else ''}")
                if name.startswith("decoder."):
                    yield module, name


def _freeze(chunk: nn.Module) -> None:
    """Train nothing but a value head, and let a gradient reach the first layer.

    Layers that are computed again have no gradient if their input has none.
    """
    for module in chunk.modules():
        if not isinstance(module, ValueHead):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        if type(module).__name__ == "LanguageModelEmbedding":
            module.register_forward_hook(lambda _, __, output: output.requires_grad_())
