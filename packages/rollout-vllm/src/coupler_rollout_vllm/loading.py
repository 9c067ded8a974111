"""Load received tensors into a vLLM model, and account for every element of every parameter."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from coupler.errors import WeightSyncError
from coupler.interfaces import Named
from coupler_rollout_vllm import compat

FILLS = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
INDEX = "model.safetensors.index.json"

Region = tuple[int, tuple[int, ...], tuple[int, ...]]  # start, shape and strides within a parameter's storage


def load(worker: Any, weights: Iterable[Named]) -> dict[str, Any]:
    """Give ``weights`` to the model's own loader; return what became of them, see :func:`receipts.join`.

    Raises:
        WeightSyncError: a tensor does not fit its parameter.
    """
    with compat.reloading(worker) as model:
        ledger = Ledger(model, compat.unfilled(model))
        with ledger:
            ledger.feed(model, weights)
    return {
        "num_received": len(ledger.received),
        "num_bytes": ledger.num_bytes,
        "unused": [name for name in ledger.received if name not in ledger.used],
        "missing": ledger.missing(Path(compat.folder_of(worker))),
    }


class Ledger(TorchDispatchMode):
    """Watches what is written into parameters, and for which received tensor.

    vLLM fuses, cuts and pads: the names of a checkpoint are not those of its parameters. Every loader ends in a copy
    into a part of a parameter, though, and this sees them all.
    """

    def __init__(self, model: torch.nn.Module, unfilled: frozenset[str]) -> None:
        super().__init__()
        self.sizes = {name: p.numel() for name, p in model.named_parameters() if name not in unfilled}
        self.owner = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
        self.regions: dict[str, set[Region]] = defaultdict(set)
        self.received: dict[str, None] = {}  # in order
        self.used: set[str] = set()
        self.num_bytes = 0
        self.current = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FILLS:
            into = args[0]
            name = self.owner.get(into.untyped_storage()._cdata)
            if name is not None:
                self.regions[name].add((into.storage_offset(), tuple(into.shape), tuple(into.stride())))
                self.used.add(self.current)
        return func(*args, **(kwargs or {}))

    def feed(self, model: Any, weights: Iterable[Named]) -> None:
        """Call the model's loader until every tensor was taken or refused."""
        stream = self._counted(weights)
        while True:
            try:
                model.load_weights(stream)
                break
            except (KeyError, ValueError, AttributeError) as error:  # how loaders refuse a name that they do not know
                if self.current in self.used:
                    raise self._unfit(error) from error
            except (AssertionError, RuntimeError) as error:
                raise self._unfit(error) from error
        for _ in stream:  # nothing, but for a loader that ends early
            continue

    def _counted(self, weights: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in weights:
            self.current = name
            self.received[name] = None
            self.num_bytes += int(tensor.nbytes)
            yield name, compat.kept(tensor)
        self.current = ""

    def _unfit(self, error: Exception) -> WeightSyncError:
        return WeightSyncError(
            f"{self.current} does not fit the rollout's model: {type(error).__name__}: {error}\n"
            "  look at:  model.path, and whether engine and rollout have the same architecture"
        )

    def missing(self, folder: Path) -> list[str]:
        """What left a parameter incomplete: names of the checkpoint that did not come, or the parameters themselves."""
        incomplete = [name for name, size in self.sizes.items() if self._filled(name) < size]
        if not incomplete:
            return []
        return sorted(checkpoint_names(folder) - self.received.keys()) or incomplete

    def _filled(self, name: str) -> int:
        return sum(_count(shape) for _, shape, _ in self.regions[name])


def checkpoint_names(folder: Path) -> set[str]:
    """Names of every tensor in a model folder; none where it has only a configuration."""
    index = folder / INDEX
    if index.exists():
        return set(json.loads(index.read_text())["weight_map"])
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
