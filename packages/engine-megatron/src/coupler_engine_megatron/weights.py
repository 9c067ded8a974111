"""Read each rank's parts of checkpoint tensors, and stream whole tensors out.

No rank ever holds more than three buckets of whole tensors, or tensors that are larger
(of experts: one of each expert-parallel rank). These are the last bucket, the one that
is read, and the next one, which travels meanwhile. Streamed tensors need not be
weights: gradients and optimizer states have the same shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from coupler.errors import CouplerError
from coupler.interfaces import Named
from coupler_engine_megatron import groups
from coupler_engine_megatron import lora_tensors as hf
from coupler_engine_megatron.distributed import exchange
from coupler_engine_megatron.experts import in_a_row

_LATENT_NORM = re.compile(r"^self_attention\.(q|kv)_layernorm\.weight$")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.linear_fc[12]\.(?:weight|lora_[AB])(\d+)$")


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter on one pipeline stage, as every rank knows it."""

    chunk: int
    """The number of the model's part on the stage."""
    index: int
    """The number in the order of the chunk's parameters."""
    name: str
    """The name in the whole model; an expert's number is that on the first rank."""
    shape: tuple[int, ...]
    """The shape on one rank."""
    tensor_model_parallel: bool
    partition_dim: int
    expert: bool


class View(NamedTuple):
    """A checkpoint's tensor within the bytes that the ranks brought together."""

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    start: int


@dataclass(slots=True)
class Run:
    """Parameters that travel as one tensor.

    They are one part, one half of it, or the parts of experts that follow each other.
    """

    parts: list[Part]
    half: int | None = None
    """The half of a gate (0) and an up (1) that are one parameter."""
    views: list[View] | None = None
    """The checkpoint's tensors in it once it came; empty if one of them is copied."""

    @property
    def elements(self) -> int:
        """Count the elements on one rank."""
        return sum(math.prod(part.shape) for part in self.parts) // (1 if self.half is None else 2)


@dataclass(slots=True)
class Bucket:
    """Runs of one pipeline stage and of one kind, which a collective brings."""

    stage: int
    dtype: torch.dtype
    travels: bool
    """True if it goes between ranks. Else there is one run."""
    runs: list[Run] = field(default_factory=list)


class Catalogue:
    """The parameters of all pipeline stages, and how checkpoint tensors make them."""

    def __init__(
        self,
        bridge: Any,
        chunks: Sequence[nn.Module],
        bucket_bytes: int,
        wanted: Callable[[str, nn.Parameter], bool] = lambda *_: True,
    ) -> None:
        """Learn of all ranks' parameters. This is collective over all ranks.

        Args:
            bucket_bytes: bytes of whole tensors that a stream holds at a time.
            wanted: tells by its name and itself if a parameter is one of the catalogue.
        """
        self.bridge, self.bucket_bytes = bridge, bucket_bytes // 3
        self.stage = groups.pipeline().rank()
        self.parameters: dict[tuple[int, int], nn.Parameter] = {}
        # Copies of tied embeddings, on the last stage.
        self.copies: list[tuple[Part, nn.Parameter]] = []

        own = []
        for number, chunk in enumerate(chunks):
            for index, (name, parameter) in enumerate(chunk.named_parameters()):
                if not wanted(name, parameter):
                    continue
                self.parameters[number, index] = parameter
                part = _part(number, index, global_name(chunk, name), parameter)
                if getattr(parameter, "shared_embedding", False) and self.stage > 0:
                    self.copies.append((part, parameter))
                else:
                    own.append(part)

        found = exchange([self.stage, [asdict(part) for part in _rising(own)]])
        stages = {
            stage: [Part(**{**p, "shape": tuple(p["shape"])}) for p in parts]
            for stage, parts in found
        }
        self.parts = [(stage, part) for stage in sorted(stages) for part in stages[stage]]
        # The buckets by the dtype of what is streamed.
        self.buckets: dict[torch.dtype, list[Bucket]] = {}

    def own(self) -> Iterator[tuple[Part, nn.Parameter]]:
        """Yield this rank's parameters."""
        for stage, part in self.parts:
            if stage == self.stage:
                yield part, self.parameters[part.chunk, part.index]
        yield from self.copies

    def names(self) -> list[str]:
        """List all checkpoint names."""
        return [
            name
            for _, part in self.parts
            for each in _experts_of(self.bridge, part)
            for name in self._hf(each)
        ]

    def _hf(self, name: str) -> list[str]:
        return hf.hf_names(self.bridge, name)

    @torch.no_grad()
    def fill(
        self, read: Callable[[str], Tensor | None], put: Callable[[nn.Parameter, Tensor], None]
    ) -> None:
        """Give ``put`` each parameter of this rank with its part of what was saved.

        ``read`` returns the tensor of a checkpoint name. A parameter stays as it is if
        ``read`` returns None.

        Raises:
            CouplerError: a tensor has another shape than the model.
        """
        for part, parameter in self.own():
            name = _on_this_rank(self.bridge, part)
            tensors = [tensor for each in self._hf(name) if (tensor := read(each)) is not None]
            if not tensors:
                continue

            whole = hf.to_megatron(self.bridge, name, tensors)
            _, size, rank = _tensor_group(part)
            piece = hf.split_tensor(self.bridge, name, whole, parameter, size)[rank]
            if piece.shape != parameter.shape:
                raise CouplerError(
                    f"{', '.join(self._hf(name))}: another shape than that of the model which "
                    "config.json describes."
                )
            put(parameter, piece)

    def stream(
        self, source: Callable[[nn.Parameter], Tensor], dtype: torch.dtype, device: torch.device
    ) -> Iterator[Named]:
        """Yield every tensor whole on every rank, under checkpoint names.

        This is collective over all ranks. ``source`` gives what to send of a parameter,
        in its shape. It is asked on the ranks that have the parameter.
        """
        if dtype not in self.buckets:
            self.buckets[dtype] = self._cut(dtype)
        for bucket, arrived in self._arrived(self.buckets[dtype], source, device):
            for run, found in zip(bucket.runs, arrived, strict=True):
                if run.views is None:
                    run.views = self._views(run, found)
                if not run.views:
                    yield from self._made(run, found)
                origin = int(found.storage_offset())
                for name, shape, strides, offset in run.views:
                    yield name, found.as_strided(shape, strides, origin + offset)

    def _cut(self, dtype: torch.dtype) -> list[Bucket]:
        """Put parts that follow each other into runs, and these into buckets."""
        buckets: list[Bucket] = []
        last: tuple[Any, ...] = ()
        room = 0

        for stage, part, half in self._pieces():
            copies = _tensor_group(part)[1] * (groups.expert().size() if part.expert else 1)
            travels = max(copies, groups.pipeline().size()) > 1
            precision = _precision(part, dtype)
            run = Run([part], half)
            size = run.elements * precision.itemsize * copies
            kind = (stage, precision, part.expert)

            if not travels or kind != last or size > room:
                buckets.append(Bucket(stage, precision, travels))
                room = self.bucket_bytes
            runs = buckets[-1].runs
            if runs and part.expert and _expert(part)[0] == _expert(runs[-1].parts[0])[0]:
                runs[-1].parts.append(part)
            else:
                runs.append(run)
            last, room = kind, room - size
        return buckets

    def _pieces(self) -> Iterator[tuple[int, Part, int | None]]:
        """Yield what is brought together by itself, with its stage.

        A gate and an up are apart if ranks have rows of both.
        """
        for stage, part in self.parts:
            apart = hf.has_halves(part.name) and not part.expert and _tensor_group(part)[1] > 1
            yield from ((stage, part, half) for half in ((0, 1) if apart else (None,)))

    def _arrived(
        self, buckets: list[Bucket], source: Callable[[nn.Parameter], Tensor], device: torch.device
    ) -> Iterator[tuple[Bucket, list[Tensor]]]:
        """Yield each bucket with its runs, while the next bucket travels."""
        started = ((bucket, *self._gathered(bucket, source, device)) for bucket in buckets)
        now = next(started, None)
        while now is not None:
            following = next(started, None)
            bucket, found, work = now
            if work is not None:
                work.wait()
            yield bucket, found
            now = following

    def _gathered(
        self, bucket: Bucket, source: Callable[[nn.Parameter], Tensor], device: torch.device
    ) -> tuple[list[Tensor], dist.Work | None]:
        """Start to bring a bucket together.

        Returns:
            Each run [expert-parallel ranks, tensor-parallel ranks, elements] on every
            rank, and the work that must be done before it is there.
        """
        mine: list[Tensor] = []
        if bucket.stage == self.stage:
            mine = [self._local(run, source, bucket.dtype) for run in bucket.runs]
        if not bucket.travels:
            return [mine[0][None, None]], None
        pipeline = groups.pipeline()

        if pipeline.size() > 1:
            sizes = [run.elements for run in bucket.runs]
            if mine:
                flat = torch.cat(mine)
            else:
                flat = torch.empty(sum(sizes), dtype=bucket.dtype, device=device)
            dist.broadcast(flat, dist.get_global_rank(pipeline, bucket.stage), group=pipeline)
            mine = list(flat.split(sizes))

        part = bucket.runs[0].parts[0]
        found, work = _gather(mine, _tensor_group(part)[0])
        if not part.expert:
            return [tensor[None] for tensor in found], work
        if work is not None:
            work.wait()
        return _gather(found, groups.expert())

    def _local(
        self, run: Run, source: Callable[[nn.Parameter], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Return the [elements] of this rank.

        They are copied only if experts do not follow each other in memory.
        """
        tensors = [source(self.parameters[part.chunk, part.index]) for part in run.parts]
        if run.half is not None:
            tensors = [tensors[0].unflatten(0, (2, -1))[run.half]]
        whole = in_a_row(tensors)
        if whole is None:
            whole = torch.stack(tensors)
        return whole.detach().to(dtype).reshape(-1)

    def _made(self, run: Run, found: Tensor) -> Iterator[Named]:
        """Yield the checkpoint's tensors of a run."""
        first = run.parts[0]
        if run.half is not None:
            yield hf.hf_names(self.bridge, first.name)[run.half], found.view(-1, *first.shape[1:])
            return
        wholes = found.unflatten(2, (len(run.parts), *first.shape)).unbind(2)
        for part, whole in zip(run.parts, wholes, strict=True):
            for name, pieces in zip(_experts_of(self.bridge, part), whole.unbind(), strict=True):
                if part.tensor_model_parallel and len(pieces) > 1:
                    yield from hf.join_to_hf(self.bridge, name, pieces, part)
                else:
                    yield from hf.to_hf(self.bridge, name, pieces[0])

    def _views(self, run: Run, found: Tensor) -> list[View]:
        """Return where the checkpoint's tensors of a run lie in ``found``.

        The list is empty if they are not all in it.
        """
        storage, origin = found.untyped_storage().data_ptr(), int(found.storage_offset())
        made = list(self._made(run, found))
        if any(tensor.untyped_storage().data_ptr() != storage for _, tensor in made):
            return []
        return [
            View(name, t.shape, t.stride(), int(t.storage_offset()) - origin) for name, t in made
        ]


def _part(chunk: int, index: int, name: str, parameter: nn.Parameter) -> Part:
    split, dim = parameter.tensor_model_parallel, parameter.partition_dim  # type: ignore[attr-defined]
    return Part(
        chunk, index, name, tuple(parameter.shape), split, dim, bool(_GROUPED_EXPERT.search(name))
    )


def global_name(chunk: Any, name: str) -> str:
    """Translate a parameter's name into the name in the whole model.

    It is the name that Transformer Engine's layers give.
    """
    name = name.removeprefix("module.")
    chunk = getattr(chunk, "module", chunk)

    if not name.startswith("decoder.layers."):
        return name

    _, _, number, inner = name.split(".", 3)
    layer = chunk.decoder.layers[int(number)]
    if chunk.config.multi_latent_attention:
        inner = _LATENT_NORM.sub(r"self_attention.linear_\1_up_proj.layer_norm_weight", inner)
    else:
        norm = "self_attention.linear_qkv.layer_norm_weight"
        inner = inner.replace("input_layernorm.weight", norm)

    if not isinstance(layer.mlp, MoELayer):
        inner = inner.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return f"decoder.layers.{layer.layer_number - 1}.{inner}"


def _tensor_group(part: Part) -> tuple[dist.ProcessGroup, int, int]:
    """Return the ranks that split a parameter's matrix, their number and this one's."""
    group = groups.expert_tensor() if part.expert else groups.tensor()
    return group, group.size(), group.rank()


def _expert(part: Part) -> tuple[str, int]:
    """Return a part's name without the expert's number, and that number.

    Other parts have their own name, and number 0.
    """
    found = _GROUPED_EXPERT.search(part.name)
    return (part.name[: found.start(1)], int(found[1])) if found else (part.name, 0)


def _rising(parts: list[Part]) -> Iterator[Part]:
    """Yield the parts with the experts of each linear map in the order of memory."""
    for _, experts in groupby(parts, lambda part: _expert(part)[0]):
        yield from sorted(experts, key=lambda part: _expert(part)[1])


@cache
def _experts_of(bridge: Any, part: Part) -> list[str]:
    """Name the parameter on each expert-parallel rank. Others have one name."""
    if not part.expert:
        return [part.name]
    ranks = groups.expert().size()
    each = bridge.config.num_moe_experts // ranks
    stem, number = _expert(part)
    return [f"{stem}{number + rank * each}" for rank in range(ranks)]


def _on_this_rank(bridge: Any, part: Part) -> str:
    names = _experts_of(bridge, part)
    return names[groups.expert().rank()] if part.expert else names[0]


def _precision(part: Part, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a part travels in.

    A router's bias decides between experts that are close, so that it is never rounded.
    """
    return torch.float32 if part.name.endswith(".expert_bias") else dtype


def _gather(
    tensors: list[Tensor], group: dist.ProcessGroup
) -> tuple[list[Tensor], dist.Work | None]:
    """Bring [...] of all ranks together as [ranks, ...], once the work is done.

    One collective brings all tensors.
    """
    if group.size() == 1:
        return [tensor[None] for tensor in tensors], None
    found = [tensor.new_empty(group.size(), *tensor.shape) for tensor in tensors]
    work = group.allgather_into_tensor_coalesced(
        [f.view(-1) for f in found], [t.reshape(-1) for t in tensors]
    )
    return found, work
