"""Checkpoint tensors and Megatron's parameters: read each rank's parts, and stream whole tensors out.

No rank ever holds more than three buckets of whole tensors, or tensors that are larger (of experts: one of each
expert-parallel rank): the last one, that which is read, and the next one, which travels meanwhile. What is streamed
need not be weights: gradients and optimizer states have the same shapes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from coupler.errors import CouplerError
from coupler.interfaces import Named
from coupler_engine_megatron import bridge as hf
from coupler_engine_megatron import groups
from coupler_engine_megatron.distributed import exchange
from coupler_engine_megatron.experts import in_a_row

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # in some old checkpoints; nothing to train
_LATENT_NORM = re.compile(r"^self_attention\.(q|kv)_layernorm\.weight$")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.linear_fc[12]\.weight(\d+)$")


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter on one pipeline stage, as every rank knows it."""

    chunk: int  # of the stage's parts of the model
    index: int  # in the order of the chunk's parameters
    name: str  # of the whole model; an expert's has its number on the first expert-parallel rank
    shape: tuple[int, ...]  # on one rank
    tensor_model_parallel: bool
    partition_dim: int
    expert: bool


class View(NamedTuple):
    """A checkpoint's tensor within what the ranks brought together."""

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    start: int


@dataclass(slots=True)
class Run:
    """What travels as one tensor: a part, one half of it, or those of experts that follow each other."""

    parts: list[Part]
    half: int | None = None  # of a gate (0) and an up (1) that are one parameter
    views: list[View] | None = None  # where the checkpoint's tensors are in it, none where one is copied; once it came

    @property
    def elements(self) -> int:
        """On one rank."""
        return sum(math.prod(part.shape) for part in self.parts) // (1 if self.half is None else 2)


@dataclass(slots=True)
class Bucket:
    """Runs of one pipeline stage and of one kind that a collective brings."""

    stage: int
    dtype: torch.dtype
    travels: bool  # between ranks; else there is one run
    runs: list[Run] = field(default_factory=list)


class Catalogue:
    """Which parameters there are, on which pipeline stage, and how they are made of the checkpoint's tensors."""

    def __init__(self, bridge: Any, chunks: Sequence[nn.Module], bucket_bytes: int) -> None:
        """Collective over all ranks.

        Args:
            bucket_bytes: of whole tensors that a stream holds at a time.
        """
        self.bridge, self.bucket_bytes = bridge, bucket_bytes // 3
        self.stage = groups.pipeline().rank()
        self.parameters: dict[tuple[int, int], nn.Parameter] = {}
        self.copies: list[tuple[Part, nn.Parameter]] = []  # of tied embeddings, on the last stage
        own = []
        for number, chunk in enumerate(chunks):
            for index, (name, parameter) in enumerate(chunk.named_parameters()):
                self.parameters[number, index] = parameter
                part = _part(number, index, _global_name(chunk, name), parameter)
                if getattr(parameter, "shared_embedding", False) and self.stage > 0:
                    self.copies.append((part, parameter))
                else:
                    own.append(part)
        found = exchange([self.stage, [asdict(part) for part in _rising(own)]])
        stages = {stage: [Part(**{**p, "shape": tuple(p["shape"])}) for p in parts] for stage, parts in found}
        self.parts = [(stage, part) for stage in sorted(stages) for part in stages[stage]]
        self.buckets: dict[torch.dtype, list[Bucket]] = {}  # by what is streamed

    def own(self) -> Iterator[tuple[Part, nn.Parameter]]:
        """This rank's parameters."""
        for stage, part in self.parts:
            if stage == self.stage:
                yield part, self.parameters[part.chunk, part.index]
        yield from self.copies

    def names(self) -> list[str]:
        """All checkpoint names."""
        return [name for _, part in self.parts for each in _experts_of(self.bridge, part) for name in self._hf(each)]

    def _hf(self, name: str) -> list[str]:
        return hf.hf_names(self.bridge, name)

    @torch.no_grad()
    def fill(self, read: Callable[[str], Tensor | None], put: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Give ``put`` each parameter of this rank and its part of what ``read`` returns for checkpoint names.

        A parameter stays as it is where ``read`` returns None.

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
                    f"{', '.join(self._hf(name))}: another shape than that of the model which config.json describes."
                )
            put(parameter, piece)

    def stream(
        self, source: Callable[[nn.Parameter], Tensor], dtype: torch.dtype, device: torch.device
    ) -> Iterator[Named]:
        """Yield every tensor whole on every rank, under checkpoint names; collective over all ranks.

        ``source`` gives what to send of a parameter, in its shape; it is asked on the ranks that have it.
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
            size, kind = run.elements * precision.itemsize * copies, (stage, precision, part.expert)
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
        """What is brought together by itself, on which stage: a gate and an up apart where ranks have rows of both."""
        for stage, part in self.parts:
            apart = hf.has_halves(part.name) and not part.expert and _tensor_group(part)[1] > 1
            yield from ((stage, part, half) for half in ((0, 1) if apart else (None,)))

    def _arrived(
        self, buckets: list[Bucket], source: Callable[[nn.Parameter], Tensor], device: torch.device
    ) -> Iterator[tuple[Bucket, list[Tensor]]]:
        """Yield each bucket with what :meth:`_gathered` brings; the next one travels meanwhile."""
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
        """Of each run [expert-parallel ranks, tensor-parallel ranks, elements] on every rank, once the work is done."""
        mine: list[Tensor] = []
        if bucket.stage == self.stage:
            mine = [self._local(run, source, bucket.dtype) for run in bucket.runs]
        if not bucket.travels:
            return [mine[0][None, None]], None
        pipeline = groups.pipeline()
        if pipeline.size() > 1:
            sizes = [run.elements for run in bucket.runs]
            flat = torch.cat(mine) if mine else torch.empty(sum(sizes), dtype=bucket.dtype, device=device)
            dist.broadcast(flat, dist.get_global_rank(pipeline, bucket.stage), group=pipeline)
            mine = list(flat.split(sizes))
        part = bucket.runs[0].parts[0]
        found, work = _gather(mine, _tensor_group(part)[0])
        if not part.expert:
            return [tensor[None] for tensor in found], work
        if work is not None:
            work.wait()
        return _gather(found, groups.expert())

    def _local(self, run: Run, source: Callable[[nn.Parameter], Tensor], dtype: torch.dtype) -> Tensor:
        """[elements] of this rank; a copy only where experts do not follow each other in memory."""
        tensors = [source(self.parameters[part.chunk, part.index]) for part in run.parts]
        if run.half is not None:
            tensors = [tensors[0].unflatten(0, (2, -1))[run.half]]
        whole = in_a_row(tensors)
        if whole is None:
            whole = torch.stack(tensors)
        return whole.detach().to(dtype).reshape(-1)

    def _made(self, run: Run, found: Tensor) -> Iterator[Named]:
        """The checkpoint's tensors of a run."""
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
        """Where the checkpoint's tensors of a run lie in ``found``; nothing where they are not all in it."""
        storage, origin = found.untyped_storage().data_ptr(), int(found.storage_offset())
        made = list(self._made(run, found))
        if any(tensor.untyped_storage().data_ptr() != storage for _, tensor in made):
            return []
        return [View(name, t.shape, t.stride(), int(t.storage_offset()) - origin) for name, t in made]


def _part(chunk: int, index: int, name: str, parameter: nn.Parameter) -> Part:
    split, dim = parameter.tensor_model_parallel, parameter.partition_dim  # type: ignore[attr-defined]
    return Part(chunk, index, name, tuple(parameter.shape), split, dim, bool(_GROUPED_EXPERT.search(name)))


def _global_name(chunk: Any, name: str) -> str:
    """Translate a parameter's name into the one that Transformer Engine's layers have in the whole model."""
    name = name.removeprefix("module.")
    chunk = getattr(chunk, "module", chunk)
    if not name.startswith("decoder.layers."):
        return name
    _, _, number, inner = name.split(".", 3)
    layer = chunk.decoder.layers[int(number)]
    if chunk.config.multi_latent_attention:
        inner = _LATENT_NORM.sub(r"self_attention.linear_\1_up_proj.layer_norm_weight", inner)
    else:
        inner = inner.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    if not isinstance(layer.mlp, MoELayer):
        inner = inner.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return f"decoder.layers.{layer.layer_number - 1}.{inner}"


def _tensor_group(part: Part) -> tuple[dist.ProcessGroup, int, int]:
    """The ranks that split a parameter's matrix, their number and this one's index."""
    group = groups.expert_tensor() if part.expert else groups.tensor()
    return group, group.size(), group.rank()


def _expert(part: Part) -> tuple[str, int]:
    """The linear map of which a part is one expert's, and the expert's number; the part's own name for others."""
    found = _GROUPED_EXPERT.search(part.name)
    return (part.name[: found.start(1)], int(found[1])) if found else (part.name, 0)


def _rising(parts: list[Part]) -> Iterator[Part]:
    """The same parts, those of one linear map in the order of its experts, which is that in memory."""
    for _, experts in groupby(parts, lambda part: _expert(part)[0]):
        yield from sorted(experts, key=lambda part: _expert(part)[1])


@cache
def _experts_of(bridge: Any, part: Part) -> list[str]:
    """The parameter's names on each expert-parallel rank; one for what is no expert."""
    if not part.expert:
        return [part.name]
    ranks = groups.expert().size()
    each = bridge.config.num_moe_experts // ranks
    stem, _, number = part.name.rpartition("weight")
    return [f"{stem}weight{int(number) + rank * each}" for rank in range(ranks)]


def _on_this_rank(bridge: Any, part: Part) -> str:
    names = _experts_of(bridge, part)
    return names[groups.expert().rank()] if part.expert else names[0]


def _precision(part: Part, dtype: torch.dtype) -> torch.dtype:
    """A router's bias decides between experts that are close: it is never rounded."""
    return torch.float32 if part.name.endswith(".expert_bias") else dtype


def _gather(tensors: list[Tensor], group: dist.ProcessGroup) -> tuple[list[Tensor], dist.Work | None]:
    """Of each [...] -> [ranks, ...], once the work is done; all of them in one collective."""
    if group.size() == 1:
        return [tensor[None] for tensor in tensors], None
    found = [tensor.new_empty(group.size(), *tensor.shape) for tensor in tensors]
    work = group.allgather_into_tensor_coalesced([f.view(-1) for f in found], [t.reshape(-1) for t in tensors])
    return found, work


class Folder:
    """The safetensors of a Hugging Face folder, read one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        """Read the index.

        Raises:
            CouplerError: the folder holds no safetensors.
        """
        self.files: dict[Path, Any] = {}
        if (folder / _INDEX).is_file():
            index = json.loads((folder / _INDEX).read_text())["weight_map"]
            self.where = {name: folder / file for name, file in index.items()}
        elif (folder / _SINGLE).is_file():
            self.where = dict.fromkeys(self._open(folder / _SINGLE).keys(), folder / _SINGLE)
        else:
            raise CouplerError(
                f"model.path={folder} holds neither {_INDEX} nor {_SINGLE}.\n"
                "  try:  save the model with save_pretrained; other formats are not read"
            )

    def check(self, names: Sequence[str], absent: Sequence[str], dropped: tuple[str, ...]) -> None:
        """Hold the checkpoint's names against the model's.

        Args:
            absent: names that may be missing.
            dropped: names that begin with one of these may be there without a parameter.

        Raises:
            CouplerError: a parameter has no tensor, or a tensor no parameter.
        """
        missing = [name for name in names if name not in self.where and name not in absent]
        known = {*names, *absent}
        unexpected = [
            name
            for name in self.where
            if name not in known and not _DERIVED.search(name) and not name.startswith(dropped)
        ]
        if missing or unexpected:
            raise CouplerError(
                "the checkpoint of model.path does not fit the model that engine=megatron builds of its config.json.\n"
                f"  missing:     {_listed(missing)}\n  unexpected:  {_listed(unexpected)}"
            )

    def read(self, name: str) -> Tensor | None:
        """The whole tensor; None where the folder has none of this name."""
        return self._open(self.where[name]).get_tensor(name) if name in self.where else None

    def _open(self, path: Path) -> Any:
        if path not in self.files:
            try:
                self.files[path] = safe_open(path, "pt")
            except (SafetensorError, FileNotFoundError) as error:
                raise CouplerError(
                    f"model.path: {path} is no whole safetensors file: {error}.\n  try:  copy it again"
                ) from None
        return self.files[path]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"
