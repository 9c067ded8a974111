"""Hold what the sampler and the receiver of one model worker share."""

from __future__ import annotations

from typing import Any

import torch

version = -1
"""Version of the weights that the next token is sampled with."""
answers: str | None = None
"""Answers of all workers to the last message, in JSON."""
manager: Any = None
"""SGLang's manager of adapters, or None if there is no room for one."""
adapter: frozenset[str] = frozenset()
"""Names of the tensors of the adapter that runs."""
_places: tuple[int, ...] = ()


def remember_parameters(model: torch.nn.Module) -> None:
    """Note where the parameters lie, since a plan copies to these places."""
    global _places
    _places = _addresses(model)


def same_parameters(model: torch.nn.Module) -> bool:
    """Tell if the parameters lie where they lay when the plan was made."""
    return _places == _addresses(model)


def _addresses(model: torch.nn.Module) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())
