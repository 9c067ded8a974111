"""Read the checkpoint of another engine into this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from coupler.engine_kit.saved import Saved, State, open_saved
from coupler.errors import CouplerError
from coupler_engine_fsdp.weights import Experts, rows_of


@torch.no_grad()
def load(
    path: Path, state: Mapping[str, Tensor], names: Mapping[str, str], experts: Experts
) -> None:
    """Fill the tensors of ``state`` in place.

    Args:
        state: what a checkpoint of this engine has, by its names there.
        names: the name that every engine knows of each parameter, by that of this one.
        experts: the experts in parameters that hold those of a layer.

    Raises:
        CouplerError: the checkpoint lacks a tensor, has it in another shape, or is
            damaged.
    """
    with open_saved(path) as saved:
        for key, target in state.items():
            if key == "num_steps" or key.endswith("/step"):
                target.fill_(saved.num_steps or 0)
                continue

            if key.endswith("/momentum"):
                raise CouplerError(
                    f"the checkpoint {path} has AdamW's moments and none of Muon's.\n"
                    "  try:  engine.optimizer=adamw, or checkpoint.load_contents=[model,extra]"
                )

            name, which = _parts(key)
            _fill(
                saved,
                which,
                names[name],
                target,
                experts,
            )


def _parts(key: str) -> tuple[str, State]:
    """Return the name of a parameter, and the state that ``key`` holds of it."""
    kind, _, name = key.partition("/")
    if kind == "params":
        return name, "param"
    name, _, moment = name.rpartition("/")
    return name, "exp_avg" if moment == "exp_avg" else "exp_avg_sq"


def _fill(
    saved: Saved,
    which: State,
    name: str,
    target: Tensor,
    experts: Experts,
) -> None:
    rows = rows_of(target) if isinstance(target, DTensor) else range(len(target))
    own = target.to_local() if isinstance(target, DTensor) else target
    if not rows:
        return

    if name in experts:
        found = torch.empty(len(rows), *target.shape[1:])
        for part, place in experts[name].items():
            if place.expert in rows:
                held = replace(place, expert=place.expert - rows.start).of(found)
                held.copy_(
                    _checked(
                        saved.tensor(which, part),
                        part,
                        held,
                    )
                )
    else:
        found = _checked(
            saved.tensor(which, name),
            name,
            target,
        )[rows.start : rows.stop]

    # Moments in 8 bits are quantised here, on their own device.
    own.copy_(found.to(own.device))


def _checked(
    whole: Tensor,
    name: str,
    target: Tensor,
) -> Tensor:
    if whole.shape != target.shape:
        raise CouplerError(
            f"the checkpoint has {name} of shape {list(whole.shape)}, and the model "
            f"{list(target.shape)}.\n  try:  the model.path and engine.lora_rank that it was "
            "saved with"
        )

    return whole
