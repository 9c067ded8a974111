"""Hold AdamW's moments on the device, or piece by piece in host memory.

Master weights, which only a step reads, are there with them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coupler.engine_kit.parked import Parked
from coupler_engine_fsdp import adamw8bit, flat
from coupler_engine_fsdp.config import FSDPConfig, OptimizerName

MOMENTS = ("exp_avg", "exp_avg_sq")
# A piece has at most so many numbers, but for a larger tensor.
PIECE = 1 << 27


@dataclass(
    frozen=True,
    slots=True,
    eq=False,
)
class Piece:
    """Some shards and their AdamW.

    Attributes:
        name: what it is parked as.
        tensors: its moments, flat, and the shards that leave the device with them.
    """

    name: str
    shards: Mapping[str, Tensor]
    adamw: torch.optim.Optimizer
    tensors: tuple[Tensor, ...]


class Moments:
    """The moments of shards, by the names of these.

    Without ``parked`` they stay on the device. With it the pieces are in host memory,
    but for those of :meth:`in_turn`, and so are the shards in ``leaving``.

    Attributes:
        eight: whether moments have 8 bits. Then a step casts the gradients of one piece
            at a time.
    """

    def __init__(
        self,
        config: FSDPConfig,
        shards: Mapping[str, Tensor],
        blocks: Mapping[str, int] | None = None,
        parked: Parked | None = None,
        leaving: Collection[str] = (),
    ) -> None:
        """Allocate the moments.

        Args:
            blocks: numbers that share a scale, of each shard whose moments have 8 bits.
            parked: the host memory of moments that are on the device in a step alone.
            leaving: shards that are on the device in a step alone, like their moments.
        """
        self.config, self.blocks, self.parked = config, blocks or {}, parked
        self.leaving = frozenset(leaving) if parked else frozenset()
        self.eight = config.optimizer == OptimizerName.ADAMW8BIT
        self.pieces: list[Piece] = []
        self._piece_of: dict[str, Piece] = {}
        self._left: dict[int, Piece] = {}

        for names in _cut(shards, PIECE) if parked or self.eight else [[*shards]]:
            piece = self._make({name: shards[name] for name in names})
            self.pieces.append(piece)
            self._piece_of |= dict.fromkeys(names, piece)
            self._left |= {id(shards[name]): piece for name in names if name in self.leaving}
            self._park(piece)

    def in_turn(self) -> Iterator[Piece]:
        """Yield the pieces, each whole on the device, while the next one comes."""
        for piece, after in zip(
            self.pieces,
            [*self.pieces[1:], None],
            strict=True,
        ):
            if self.parked:
                self.parked.onload(piece.name, wait=False)
                if after:
                    self.parked.onload(after.name, wait=False)
                self.parked.arrive(piece.name)

            yield piece
            self._park(piece)

    def advance(
        self,
        piece: Piece,
        lr: float,
    ) -> None:
        """Take a step of one piece."""
        if self.eight:
            adamw8bit.advance(piece.adamw, lr)
            return

        for group in piece.adamw.param_groups:
            group["lr"] = lr
        piece.adamw.step()

    def value(self, shard: Tensor) -> Tensor:
        """Return the numbers of a shard between steps, where they are.

        What is written to them in host memory comes to the device with the next step.
        """
        piece = self._left.get(id(shard))
        return self.parked.kept(piece.name, shard) if self.parked and piece else shard

    def state(self, name: str) -> dict[str, Tensor]:
        """Return what a checkpoint has of a shard, where it is now.

        These are its ``step`` and its moments, or their codes and scales. What is
        written to moments in host memory comes to the device with them.
        """
        piece = self._piece_of[name]
        shard = piece.shards[name]
        state = piece.adamw.state[shard]
        found = {key: state[key] for key in MOMENTS}

        if block := self.blocks.get(name):
            row = math.prod(shard.shape[1:])
            found = {
                f"{key}/{part}": tensor
                for key, moment in found.items()
                for part, tensor in adamw8bit.parts(
                    moment,
                    row,
                    block,
                ).items()
            }
        if self.parked:
            found = {key: self.parked.kept(piece.name, each) for key, each in found.items()}
        return {"step": state["step"], **found}

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return the two moments of a shard, which take numbers of any precision."""
        piece, held = self._piece_of[name], self.state(name)
        state = piece.adamw.state[piece.shards[name]]

        if not self._has_codes(name):
            return {key: held[key] if key in held else state[key] for key in MOMENTS}
        return {
            key: adamw8bit.on(
                state[key],
                held[f"{key}/{adamw8bit.CODES}"],
                held[f"{key}/{adamw8bit.SCALES}"],
            )
            for key in MOMENTS
        }

    def maps(self) -> dict[str, Tensor]:
        """Return what codes stand for, fp32 [256], by the moment's key.

        It is empty if no moment here has 8 bits.
        """
        name = next(filter(self._has_codes, self.blocks), None)
        if name is None:
            return {}
        piece = self._piece_of[name]
        state: dict[str, Any] = piece.adamw.state[piece.shards[name]]
        return {f"{key}/{adamw8bit.MAP}": state[key].qmap for key in MOMENTS}

    def _has_codes(self, name: str) -> bool:
        """Tell if moments have 8 bits, and this rank has a row of them."""
        return name in self.blocks and bool(self._piece_of[name].shards[name].numel())

    def on_device(self) -> list[Tensor]:
        """Return the storages of moments that are on the device between steps."""
        return [] if self.parked else [each for piece in self.pieces for each in piece.tensors]

    def _park(self, piece: Piece) -> None:
        if self.parked:
            self.parked.offload(piece.name, piece.tensors)

    def _make(self, shards: Mapping[str, Tensor]) -> Piece:
        # Biases and norms do not decay.
        matrices = [shard for shard in shards.values() if shard.ndim > 1]
        vectors = [shard for shard in shards.values() if shard.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        adamw = (
            adamw8bit.optimizer(self.config, groups) if self.eight else _adamw(self.config, groups)
        )

        # Allocated now, so that a checkpoint can be read into a fresh optimizer.
        storages: list[Tensor] = []
        for shard in shards.values():
            device = None if self.eight else shard.device
            adamw.state[shard] = {
                "step": torch.zeros(
                    (),
                    dtype=torch.float32,
                    device=device,
                )
            }
        for key in MOMENTS:
            held, moments = self._zeros(shards, signed=key == MOMENTS[0])
            storages += held
            for shard, moment in zip(
                shards.values(),
                moments,
                strict=True,
            ):
                adamw.state[shard][key] = moment
        return Piece(
            f"moments {len(self.pieces)}",
            shards,
            adamw,
            (*storages, *(shard for name, shard in shards.items() if name in self.leaving)),
        )

    def _zeros(
        self, shards: Mapping[str, Tensor], *, signed: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return storages, and one moment of each shard in them."""
        if self.eight:
            return adamw8bit.zeros(
                shards,
                self.blocks,
                signed,
            )

        device = next((shard.device for shard in shards.values()), None)
        sizes = [shard.numel() for shard in shards.values()]
        whole, views = flat.zeros(
            sizes,
            torch.float32,
            device,
        )
        moments = [
            v.view(shard.shape)
            for v, shard in zip(
                views,
                shards.values(),
                strict=True,
            )
        ]
        return [whole], moments


def _adamw(config: FSDPConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=betas,
        eps=config.eps,
        fused=True,
    )


def _cut(shards: Mapping[str, Tensor], most: int) -> list[list[str]]:
    """Cut names into runs of at most so many numbers, or of one."""
    pieces: list[list[str]] = []
    left = 0
    for name, shard in shards.items():
        if not pieces or shard.numel() > left:
            pieces.append([])
            left = most
        pieces[-1].append(name)
        left -= shard.numel()
    return pieces
