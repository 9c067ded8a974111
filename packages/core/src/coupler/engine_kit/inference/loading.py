"""Load received tensors into a model worker's model, and count every element.

This runs in the model workers of an inference engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch.utils._python_dispatch import TorchDispatchMode

from coupler.engine_kit.inference.checkpoint import checkpoint_names, checkpoint_tensors
from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Named, Shapes

COPY = torch.ops.aten.copy_.default
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

Region = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Start, shape and strides within a storage."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a received tensor, and the part of a parameter that it is copied to."""

    into: torch.Tensor
    source: Region

    def copy(self, tensor: torch.Tensor) -> None:
        start, shape, strides = self.source
        self.into.copy_(tensor.as_strided(shape, strides, tensor.storage_offset() + start))


@dataclass(frozen=True, slots=True)
class Way:
    """The pieces by which a received tensor of this shape is copied."""

    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)


Plan = dict[str, Way]
"""The way of each tensor, by the name that it comes with."""
plans: WeakKeyDictionary[torch.nn.Module, Plan] = WeakKeyDictionary()


def as_tensor(tensor: Any) -> torch.Tensor:
    """Convert a tensor that a transport brought, without a copy."""
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor)


def shapes_of(model: torch.nn.Module, folder: Path) -> Shapes:
    """Return the shapes of the tensors that the model takes.

    They are as in the last update, else as in the checkpoint. They are empty if the
    folder has no checkpoint to read.
    """
    known = plans.get(model)
    if known is not None:
        return {name: way.shape for name, way in known.items()}
    try:
        return checkpoint_tensors(folder)
    # Weights come over the wire, so a pointer to a file serves as well as the file.
    except SafetensorError:
        return {}


def record(model: Any, weights: Iterable[Named], folder: Path) -> dict[str, Any]:
    """Load through the model's own loader.

    Its copies become the plan if copies alone filled every parameter.
    """
    ledger = Ledger(model, frozenset())
    with ledger:
        ledger.feed(model, ((name, as_tensor(tensor)) for name, tensor in weights))
    answer = ledger.answer(folder)
    if not answer["missing"] and ledger.plannable:
        plans[model] = {name: ledger.ways[name] for name in ledger.received if name in ledger.used}
    return answer


def copy(plan: Plan, weights: Iterable[Named]) -> dict[str, Any]:
    """Copy every tensor to where it went before.

    Raises:
        WeightSyncError: a tensor has another shape than before.
    """
    received: dict[str, None] = {}
    num_bytes = 0
    for name, sent in weights:
        tensor = as_tensor(sent).contiguous()
        received[name] = None
        num_bytes += int(tensor.nbytes)
        if way := plan.get(name):
            if tensor.shape != way.shape:
                raise unfit(name, f"its shape is {list(tensor.shape)}, and was {list(way.shape)}")
            for piece in way.pieces:
                piece.copy(tensor)
        # In shared memory, the owner waits until the tensor is let go.
        del sent, tensor

    unused = [name for name in received if name not in plan]
    return account(received, num_bytes, unused, sorted(plan.keys() - received.keys()))


def least_precise(model: torch.nn.Module) -> str:
    """Name the dtype of the model's parameters that has the fewest bits."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return str(min(dtypes, key=lambda dtype: (dtype.itemsize, str(dtype))))


def account(
    received: Sized, num_bytes: int, unused: list[str], missing: list[str]
) -> dict[str, Any]:
    return {
        "num_received": len(received),
        "num_bytes": num_bytes,
        "unused": unused,
        "missing": missing,
    }


class Ledger(TorchDispatchMode):
    """Watch what is written into parameters, and for which received tensor.

    Engines fuse, cut and pad, so that the names of a checkpoint are not those of its
    parameters. Every loader ends in a copy into a part of a parameter, though, and this
    mode sees all copies.
    """

    def __init__(self, model: torch.nn.Module, unfilled: frozenset[str]) -> None:
        super().__init__()
        self.sizes = {
            name: p.numel() for name, p in model.named_parameters() if name not in unfilled
        }
        # Held alive, so that no address is used again.
        self.storages = {name: p.untyped_storage() for name, p in model.named_parameters()}
        self.owner = {storage._cdata: name for name, storage in self.storages.items()}

        self.regions: dict[str, set[Region]] = defaultdict(set)
        self.ways: Plan = {}
        self.plannable = True
        # A dictionary keeps the order.
        self.received: dict[str, None] = {}
        self.used: set[str] = set()
        self.num_bytes = 0
        self.current = ""
        self.tensor = torch.empty(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is COPY or func in FILLS:
            name = self.owner.get(args[0].untyped_storage()._cdata)
            if name is not None:
                self.regions[name].add(region(args[0]))
                if func is COPY:
                    self._copied(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _copied(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self.used.add(self.current)
        start, shape, strides = region(source)
        if source.untyped_storage()._cdata == self.tensor.untyped_storage()._cdata:
            way = self.ways.setdefault(self.current, Way(tuple(self.tensor.shape)))
            way.pieces.append(
                Piece(into, (start - int(self.tensor.storage_offset()), shape, strides))
            )
        # A computed tensor was copied, and only the loader knows how it is computed.
        else:
            self.plannable = False

    def feed(self, model: Any, weights: Iterable[Named]) -> None:
        """Call the model's loader until every tensor was taken or refused."""
        stream = self._counted(weights)
        while True:
            try:
                model.load_weights(stream)
                break
            # This is how loaders refuse a name that they do not know.
            except (KeyError, ValueError, AttributeError) as error:
                if self.current in self.used:
                    raise self._unfit(error) from error
            except (AssertionError, RuntimeError) as error:
                raise self._unfit(error) from error

    def _counted(self, weights: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in arriving(weights):
            self.current, self.tensor = name, tensor
            self.received[name] = None
            self.num_bytes += int(tensor.nbytes)
            yield name, tensor

    def _unfit(self, error: Exception) -> WeightSyncError:
        return unfit(self.current, f"{type(error).__name__}: {error}")

    def is_whole(self, parameter: torch.Tensor) -> bool:
        """Tell if every element of a parameter of the model was written."""
        name = self.owner[parameter.untyped_storage()._cdata]
        return self._filled(name) >= parameter.numel()

    def answer(self, folder: Path) -> dict[str, Any]:
        """Return what became of the tensors.

        If a parameter is incomplete, the checkpoint's names that did not come are
        missing. Without a checkpoint in the folder, the parameter's own name is.
        """
        incomplete = [name for name, size in self.sizes.items() if self._filled(name) < size]
        missing: list[str] = []
        if incomplete:
            missing = sorted(checkpoint_names(folder) - self.received.keys()) or incomplete

        unused = [name for name in self.received if name not in self.used]
        return account(self.received, self.num_bytes, unused, missing)

    def _filled(self, name: str) -> int:
        return sum(torch.Size(shape).numel() for _, shape, _ in self.regions[name])


def arriving(weights: Iterable[Named]) -> Iterator[Named]:
    """Yield the tensors. What fails in between is the transport, and no loader.

    Raises:
        WeightSyncError: the transport failed.
    """
    source = iter(weights)
    while True:
        try:
            named = next(source)
        except StopIteration:
            return
        except CouplerError:
            raise
        except Exception as error:
            raise WeightSyncError(
                f"the weights did not arrive: {type(error).__name__}: {error}\n"
                "  look at:  sync.transport, and whether both sides have its library in the same "
                "settings"
            ) from error
        yield named


def unfit(name: str, why: str) -> WeightSyncError:
    return WeightSyncError(
        f"{name} does not fit the rollout's model: {why}.\n"
        "  look at:  model.path, and whether engine and rollout have the same architecture"
    )


def region(tensor: torch.Tensor) -> Region:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
