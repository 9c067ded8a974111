"""Read checkpoints of any engine by the names of a Hugging Face folder.

Engines write their own files, fast and without talking to each other. What these hold
is one thing: parameters and AdamW's moments in fp32, each whole under the name of its
weight, and the optimizer steps done. Two layouts of files are known.

*Rows*: ``shard-00001-of-00004.safetensors`` has the rows of one rank of every tensor,
and ``index.json`` the shapes. The experts of a layer are one tensor. A moment in 8 bits
is the tensors ``codes``, ``scales`` of its blocks, and ``map``: code c of a block is
``map[c]`` times the scale.

*Whole tensors*: each is in one file, and ``index.json`` names it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from coupler.engine_kit.lora_names import names_of, weight_of
from coupler.errors import CouplerError
from coupler.system.files import DamagedFile, read_json

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "index.json"
State = Literal["param", "exp_avg", "exp_avg_sq"]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(lora_[AB])")


class Saved(ABC):
    """A checkpoint, read one whole tensor at a time. Use it in a ``with`` statement.

    Attributes:
        num_steps: optimizer steps done, or None without an optimizer.
    """

    num_steps: int | None

    def __init__(
        self,
        path: Path,
        index: dict[str, Any],
    ) -> None:
        self.path, self.index = path, index
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @abstractmethod
    def tensor(
        self,
        state: State,
        name: str,
    ) -> Tensor:
        """Return a state of a weight, whole and in fp32.

        Args:
            name: that of the weight in a Hugging Face folder, or of
                :mod:`coupler.engine_kit.lora_names`.

        Raises:
            CouplerError: the checkpoint has no such tensor, or its file is damaged.
        """

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                opened = safe_open(self.path / file, "pt")
            except (SafetensorError, OSError) as error:
                raise damaged(self.path / file, error) from None
            self._files[file] = self._stack.enter_context(opened)
        return self._files[file]

    def _read(
        self,
        file: str,
        key: str,
    ) -> Tensor:
        from safetensors import SafetensorError

        try:
            return self._open(file).get_tensor(key)
        except SafetensorError as error:
            raise damaged(self.path / file, error) from None

    def _absent(self, key: str) -> CouplerError:
        return CouplerError(
            f"the checkpoint {self.path} does not fit this engine: it has no {key}.\n"
            "  try:  the model.path and the parts that it was saved with"
        )


class WholeTensors(Saved):
    """Each tensor in one file, under its state and its name."""

    def __init__(
        self,
        path: Path,
        index: dict[str, Any],
    ) -> None:
        super().__init__(path, index)
        self.num_steps = index.get("num_steps")

    def tensor(
        self,
        state: State,
        name: str,
    ) -> Tensor:
        key = f"{'params' if state == 'param' else state}/{name}"
        file = self.index["tensors"].get(key)
        if file is None:
            raise self._absent(key)
        return self._read(file, key)


class Rows(Saved):
    """The rows of every tensor over several files."""

    def __init__(
        self,
        path: Path,
        index: dict[str, Any],
    ) -> None:
        super().__init__(path, index)
        self.num_steps = None
        if "num_steps" in index["tensors"]:
            self.num_steps = int(self._whole("num_steps"))
        # All experts of a layer are asked for one by one.
        self._stacked = lru_cache(maxsize=2)(self._number)

    def tensor(
        self,
        state: State,
        name: str,
    ) -> Tensor:
        if weight := weight_of(name):
            part = "lora_A" if name == names_of(weight)[0] else "lora_B"
            name = f"{weight.removesuffix('.weight')}.{part}"

        key = _key(state, name)
        if self._has(key):
            return self._number(key, state)
        if found := _OF_EXPERT.fullmatch(name):
            stacked = _key(state, f"{found[1]}.{found[4]}_{found[3]}")
            if not self._has(stacked):
                raise self._absent(stacked)
            return self._stacked(stacked, state)[int(found[2])]
        if not (found := _EXPERT.fullmatch(name)):
            raise self._absent(key)

        prefix, expert, which = found[1], int(found[2]), found[3]
        fused = _key(state, f"{prefix}.{'down_proj' if which == 'down' else 'gate_up_proj'}")
        if not self._has(fused):
            raise self._absent(fused)
        rows = self._stacked(fused, state)[expert]
        return rows if which == "down" else rows.chunk(2)[which == "up"]

    def _has(self, key: str) -> bool:
        return key in self.index["tensors"] or f"{key}/codes" in self.index["tensors"]

    def _number(self, key: str, state: State) -> Tensor:
        """Return a tensor in fp32, of 8 bits or not."""
        if key in self.index["tensors"]:
            return self._whole(key)

        codes, scales = (self._whole(f"{key}/{part}") for part in ("codes", "scales"))
        numbers = self._whole(f"optimizer/{state}/map")[codes.long()]
        return (numbers.view(*scales.shape, -1) * scales[..., None]).view(codes.shape)

    def _whole(self, key: str) -> Tensor:
        import torch

        shards, entry = self.index["shards"], self.index["tensors"][key]
        files = [f"shard-{i:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        if not entry["sharded"]:
            return self._read(files[0], key)
        size = -(-entry["shape"][0] // shards)
        held = [file for i, file in enumerate(files) if i * size < entry["shape"][0]]
        return torch.cat([self._read(file, key) for file in held])


def _key(state: State, name: str) -> str:
    return f"params/{name}" if state == "param" else f"optimizer/{name}/{state}"


def open_saved(path: Path) -> Saved:
    """Open a checkpoint's folder of one role, of whichever engine wrote it.

    Raises:
        CouplerError: it holds no checkpoint, or its index is damaged.
    """
    try:
        index = read_json(path / INDEX)
        layout = Rows if "shards" in index else WholeTensors
        # An index without them is damaged.
        index["tensors"].keys()

        return layout(path, index)
    except (DamagedFile, OSError) as error:
        raise CouplerError(f"{path} holds no checkpoint of an engine: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path / INDEX, error) from None


def damaged(path: Path, error: Exception) -> CouplerError:
    """Return the error that says that a file is not what was written."""
    return CouplerError(f"{path} is damaged: {error!r}.\n  try:  an earlier checkpoint")
