"""Load weights into layers that SGLang quantises, again with every update.

SGLang quantises a layer once, and then drops the parameters that its loader fills. Here
a layer keeps both forms. The loaded one has memory only while the layer is loaded. The
one that kernels read stays at its address, which CUDA graphs know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from coupler.engine_kit.inference.loading import Ledger, as_tensor
from coupler.interfaces import Named

SCALE = "_scale"
"""Ends the names of parameters that no checkpoint of whole weights has."""

Parameters = dict[str, torch.nn.Parameter]


@dataclass(slots=True)
class Layer:
    """Hold both forms of a quantised layer."""

    loaded: Parameters
    """Parameters that the loader fills, by their names in the layer."""
    kernel: Parameters
    """Parameters that kernels read."""
    quantise: Callable[[], object]
    """Makes new parameters for kernels from the loaded ones."""
    ledger: Ledger | None = None
    """What the update under way has written. None once the layer is whole."""


layers: WeakKeyDictionary[torch.nn.Module, Layer] = WeakKeyDictionary()


def quantise_once(original: Callable[..., None], method: Any, module: torch.nn.Module) -> None:
    """Quantise a layer for the first time, and keep both forms of it.

    At the end of an update SGLang asks again. The layer is quantised by then.
    """
    if module in layers:
        return
    before = _parameters(module)
    original(method, module)

    kernel = {
        name: parameter
        for name, parameter in _parameters(module).items()
        if before.get(name) is not parameter
    }
    loaded = {
        name: parameter
        for name, parameter in before.items()
        if name in kernel and not name.endswith(SCALE)
    }
    layers[module] = Layer(
        loaded,
        kernel,
        quantise=partial(original, method, module),
    )

    for parameter in loaded.values():
        _watch(module, parameter)
        _resize(parameter, 0)


def without_scales(original: Callable[..., None], method: Any, module: Any) -> None:
    """Take the random scales out of a cache's layer, so that SGLang sets them to 1."""
    module.k_scale.data.fill_(-1.0)
    module.v_scale.data.fill_(-1.0)
    original(method, module)


def load(model: torch.nn.Module, weights: Iterable[Named], folder: Path) -> dict[str, Any]:
    """Load through the model's own loader, and quantise each layer once it is whole.

    Returns:
        What became of the tensors, as ``receipts.join`` of core reads it.

    Raises:
        WeightSyncError: a tensor does not fit its parameter.
    """
    given = ((name, as_tensor(tensor)) for name, tensor in weights)
    with _loadable(model) as ledger, ledger:
        ledger.feed(model, given)
    return ledger.answer(folder)


@contextmanager
def _loadable(model: torch.nn.Module) -> Iterator[Ledger]:
    """Let the loader see the loaded form of every layer.

    A layer that stays incomplete keeps the weights that it had.
    """
    ours = {module: layers[module] for module in model.modules() if module in layers}
    for module, layer in ours.items():
        module._parameters.update(layer.loaded)
        for name in layer.kernel.keys() - layer.loaded.keys():
            del module._parameters[name]

    ledger = Ledger(
        model,
        unfilled=frozenset(name for name, _ in model.named_parameters() if name.endswith(SCALE)),
    )
    for layer in ours.values():
        layer.ledger = ledger
    try:
        yield ledger
    finally:
        for module, layer in ours.items():
            _finish(module, layer)


def _watch(module: torch.nn.Module, parameter: Any) -> None:
    """Give a parameter memory before it is written, and quantise its layer after."""
    name = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
    original = getattr(parameter, name)

    def watched(*args: Any, **named: Any) -> Any:
        layer = layers[module]
        # A tensor that comes after its layer was whole counts as one that nobody takes.
        if layer.ledger is None:
            return None

        _resize(parameter, parameter.numel())
        made = original(*args, **named)
        if all(map(layer.ledger.is_whole, layer.loaded.values())):
            _requantise(module, layer)
        return made

    setattr(parameter, name, watched)


def _requantise(module: torch.nn.Module, layer: Layer) -> None:
    """Quantise what was loaded, into the memory that kernels read."""
    layer.quantise()

    made = _parameters(module)
    for name, parameter in layer.kernel.items():
        parameter.data.copy_(made[name].data)
    _finish(module, layer)


def _finish(module: torch.nn.Module, layer: Layer) -> None:
    """Put the parameters for kernels back, and free the loaded ones."""
    module._parameters.update(layer.kernel)
    for parameter in layer.loaded.values():
        _resize(parameter, 0)
    layer.ledger = None


def _parameters(module: torch.nn.Module) -> Parameters:
    return {name: p for name, p in module._parameters.items() if p is not None}


def _resize(parameter: torch.Tensor, elements: int) -> None:
    """Give a parameter memory for so many elements, or take it. It stays the same
    object.
    """
    size = elements * parameter.element_size()
    if parameter.untyped_storage().size() != size:
        parameter.untyped_storage().resize_(size)
