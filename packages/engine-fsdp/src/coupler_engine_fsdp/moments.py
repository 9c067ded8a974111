"""Hold AdamW's moments on the device, or piece by piece in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coupler.engine_kit.parked import Parked
from coupler_engine_fsdp.config import FSDPConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
# Moments start at multiples of so many numbers in their storage.
ALIGNED = 128
# A piece in host memory has at most so many numbers, but for a larger tensor.
PIECE = 1 << 27


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some shards and their AdamW.

    Attributes:
        name: what its moments are parked as.
        tensors: the storages of its moments, flat.
    """

    name: str
    shards: Mapping[str, Tensor]
    adamw: torch.optim.AdamW
    tensors: tuple[Tensor, ...]


class Moments:
    """The moments of shards, by the names of these.

    Without ``parked`` there is one piece, which stays on the device. With it the pieces
    are in host memory, but for those of :meth:`in_turn`.
    """

    def __init__(
        self, config: FSDPConfig, shards: Mapping[str, Tensor], parked: Parked | None = None
    ) -> None:
        self.config, self.parked = config, parked
        self.pieces: list[Piece] = []
        self._piece_of: dict[str, Piece] = {}

        for names in _cut(shards, PIECE) if parked else [[*shards]]:
            piece = self._make({name: shards[name] for name in names})
            self.pieces.append(piece)
            self._piece_of |= dict.fromkeys(names, piece)
            self._park(piece)

    def in_turn(self) -> Iterator[Piece]:
        """Yield the pieces, each whole on the device, while the next one comes."""
        for piece, after in zip(self.pieces, [*self.pieces[1:], None], strict=True):
            if self.parked:
                self.parked.onload(piece.name, wait=False)
                if after:
                    self.parked.onload(after.name, wait=False)
                self.parked.arrive(piece.name)

            yield piece
            self._park(piece)

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the state of a shard: its ``step``, and its moments where they are.

        What is written to moments in host memory comes to the device with them.
        """
        piece = self._piece_of[name]
        state = piece.adamw.state[piece.shards[name]]

        if not self.parked:
            return state
        host = {key: self.parked.kept(piece.name, state[key]) for key in MOMENTS}
        return {"step": state["step"], **host}

    def on_device(self) -> list[Tensor]:
        """Return the storages that are on the device between steps."""
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
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.config.lr,
            betas=(self.config.beta1, self.config.beta2),
            eps=self.config.eps,
            fused=True,
        )

        # Allocated now, so that a checkpoint can be read into a fresh optimizer.
        flat = tuple(_zeros([*shards.values()]) for _ in MOMENTS)
        for shard, *moments in zip(
            shards.values(), *(_views(whole, [*shards.values()]) for whole in flat), strict=True
        ):
            step = torch.zeros((), dtype=torch.float32, device=shard.device)
            adamw.state[shard] = {"step": step, **dict(zip(MOMENTS, moments, strict=True))}
        return Piece(f"moments {len(self.pieces)}", shards, adamw, flat)


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


def _zeros(shards: Sequence[Tensor]) -> Tensor:
    """Return room for fp32 numbers like those of all ``shards``, in one storage.

    A GPU takes as long to free hundreds of storages as to copy gigabytes.
    """
    device = shards[0].device if shards else None
    return torch.zeros(sum(map(_room, shards)), dtype=torch.float32, device=device)


def _views(whole: Tensor, shards: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(whole.split([_room(shard) for shard in shards]), shards, strict=True)
    return [piece[: shard.numel()].view(shard.shape) for piece, shard in pairs]


def _room(shard: Tensor) -> int:
    return -(-shard.numel() // ALIGNED) * ALIGNED
