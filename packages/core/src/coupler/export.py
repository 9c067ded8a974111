"""Write a folder in Hugging Face layout from an engine's stream of whole tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from coupler.errors import CouplerError
from coupler.interfaces import Head, Named

MAX_SHARD_BYTES = 4 << 30
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # config, generation config, tokenizer


def export(weights: Iterable[Named], folder: Path, source: Path, head: Head = Head.LM, *, write: bool) -> int:
    """Stream ``weights`` into safetensors shards in ``folder``, beside the configuration files of ``source``.

    Every rank iterates, since producing a tensor is collective; the one with ``write`` writes. At most one shard is
    held in host memory. The result is checked: its names and shapes are read back and compared with what was streamed.
    With ``Head.VALUE`` the folder is one for ``AutoModelForTokenClassification``.

    Returns:
        The number of tensors.

    Raises:
        CouplerError: the files do not hold what was written.
    """
    writer = _Writer(folder) if write else None
    count = 0
    for name, tensor in weights:
        count += 1
        if writer:
            writer.add(name, tensor)
    if writer:
        writer.close()
        _copy_configuration(source, folder)
        if head is Head.VALUE:
            _declare_value_head(folder / "config.json")
    return count


class _Writer:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.held: dict[str, Any] = {}
        self.held_bytes = 0
        self.total_bytes = 0
        self.shards: list[dict[str, tuple[int, ...]]] = []

    def add(self, name: str, tensor: Any) -> None:
        if self.held and self.held_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            self._flush()
        copy = np.array(tensor) if isinstance(tensor, np.ndarray) else tensor.detach().cpu().clone().contiguous()
        self.held[name] = copy
        self.held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f"shard-{len(self.shards)}.safetensors"
        if isinstance(next(iter(self.held.values())), np.ndarray):
            from safetensors.numpy import save_file

            save_file(self.held, path, metadata={"format": "np"})
        else:
            from safetensors.torch import save_file as save_torch

            save_torch(self.held, path, metadata={"format": "pt"})
        self.shards.append({name: tuple(tensor.shape) for name, tensor in self.held.items()})
        self.held, self.held_bytes = {}, 0

    def close(self) -> None:
        if self.held:
            self._flush()
        single = len(self.shards) == 1
        index: dict[str, str] = {}
        for i, shapes in enumerate(self.shards):
            name = "model.safetensors" if single else f"model-{i + 1:05d}-of-{len(self.shards):05d}.safetensors"
            path = (self.folder / f"shard-{i}.safetensors").replace(self.folder / name)
            _verify(path, shapes)
            index |= dict.fromkeys(shapes, name)
        if not single:
            content = {"metadata": {"total_size": self.total_bytes}, "weight_map": index}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))


def _verify(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    if found != shapes:
        odd = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
        raise CouplerError(f"{path} does not hold what was written.\n  first difference: {odd[0]}")


def _copy_configuration(source: Path, folder: Path) -> None:
    for pattern in COPIED:
        for path in source.glob(pattern):
            if not path.name.endswith(".safetensors.index.json"):
                shutil.copy(path, folder / path.name)


def _declare_value_head(path: Path) -> None:
    """Say in a config.json that the model has one label a token: transformers then builds ``score`` with one row."""
    config = json.loads(path.read_text())
    names = [name.replace("ForCausalLM", "ForTokenClassification") for name in config.get("architectures", [])]
    labels = {"architectures": names, "id2label": {"0": "value"}, "label2id": {"value": 0}}
    path.write_text(json.dumps({**config, **labels}, indent=2))
