"""Read the safetensors of a Hugging Face folder, and check their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from coupler.engine_kit.json_files import read_json
from coupler.errors import CouplerError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# Some old checkpoints have these tensors, which nobody trains.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")


class Folder:
    """The safetensors of a Hugging Face folder, read one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        """Read the index.

        Raises:
            CouplerError: the folder holds no safetensors.
        """
        self.files: dict[Path, Any] = {}
        if (folder / _INDEX).is_file():
            index = read_json(folder / _INDEX)["weight_map"]
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
            dropped: names that begin with one of these need no parameter.

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
                "the checkpoint of model.path does not fit the model that engine=megatron "
                "builds of its config.json.\n"
                f"  missing:     {_listed(missing)}\n  unexpected:  {_listed(unexpected)}"
            )

    def read(self, name: str) -> Tensor | None:
        """Return the whole tensor, or None if the folder has none of this name."""
        return self._open(self.where[name]).get_tensor(name) if name in self.where else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._open(self.where[name]).get_slice(name).get_shape())

    def _open(self, path: Path) -> Any:
        if path not in self.files:
            try:
                self.files[path] = safe_open(path, "pt")
            except (SafetensorError, FileNotFoundError) as error:
                raise CouplerError(
                    f"model.path: {path} is no whole safetensors file: {error}.\n  try:  copy "
                    "it again"
                ) from None
        return self.files[path]


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + rest or "none"
