"""Write a folder in Hugging Face layout from an engine's stream of whole tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from coupler.errors import CouplerError
from coupler.interfaces import Head, Named
from coupler.system.files import read_json, writing

MAX_SHARD_BYTES = 4 << 30
# The configuration, the tokenizer, and the code that `auto_map` names, which
# transformers reads from the top of a folder.
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")


def export(
    weights: Iterable[Named], folder: Path, source: Path, head: Head = Head.LM, *, write: bool
) -> int:
    """Stream ``weights`` into safetensors shards in ``folder``, and copy the other
    files of ``source``.

    These are the configuration, the tokenizer and the Python code of a model that
    brings its own. Every rank iterates, since producing a tensor is collective, and the
    one with ``write`` writes. At most one shard is held in host memory. Each shard is
    read back, one tensor at a time, and compared with what was streamed to the bit.
    With ``Head.VALUE`` the folder is one for ``AutoModelForTokenClassification``, and
    with ``Head.SCORE`` for ``AutoModelForSequenceClassification``.

    Returns:
        The number of tensors.

    Raises:
        CouplerError: the files cannot be written, or do not hold what was written.
    """
    if not write:
        return sum(1 for _ in weights)

    writer = _Writer(folder)
    count = 0
    for name, tensor in weights:
        count += 1
        writer.add(name, tensor)
    writer.close()

    with writing(f"the export {folder}"):
        _copy_configuration(source, folder)
        if head is not Head.LM:
            _declare_score(folder / "config.json", head)
    return count


class _Writer:
    def __init__(self, folder: Path) -> None:
        with writing(f"the export {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.held: dict[str, Any] = {}
        self.held_bytes = 0
        self.total_bytes = 0
        # names by shard
        self.shards: list[list[str]] = []

    def add(self, name: str, tensor: Any) -> None:
        if self.held and self.held_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            self._flush()
        copy = (
            np.array(tensor)
            if isinstance(tensor, np.ndarray)
            else tensor.detach().cpu().clone().contiguous()
        )
        self.held[name] = copy
        self.held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f"shard-{len(self.shards)}.safetensors"
        framework = "np" if isinstance(next(iter(self.held.values())), np.ndarray) else "pt"
        if framework == "np":
            from safetensors.numpy import save_file
        else:
            from safetensors.torch import save_file

        with writing(f"the export {path}", SafetensorError):
            save_file(self.held, path, metadata={"format": framework})
        _verify(path, self.held, framework)
        self.shards.append(list(self.held))
        self.held, self.held_bytes = {}, 0

    def close(self) -> None:
        if self.held:
            self._flush()
        count = len(self.shards)
        index: dict[str, str] = {}

        with writing(f"the export {self.folder}"):
            for i, names in enumerate(self.shards):
                part = f"-{i + 1:05d}-of-{count:05d}" if count > 1 else ""
                name = f"model{part}.safetensors"
                (self.folder / f"shard-{i}.safetensors").replace(self.folder / name)
                index |= dict.fromkeys(names, name)

            if count != 1:
                content = {"metadata": {"total_size": self.total_bytes}, "weight_map": index}
                path = self.folder / "model.safetensors.index.json"
                path.write_text(json.dumps(content, indent=2))


def _verify(path: Path, written: Mapping[str, Any], framework: str) -> None:
    try:
        with safe_open(path, framework=framework) as file:
            names = written.keys() ^ set(file.keys())
            odd = sorted(names) or [
                name for name in written if not _same(file.get_tensor(name), written[name])
            ]
    except (OSError, SafetensorError) as error:
        raise CouplerError(f"{path} cannot be read back: {error}.\n  look at:  the disk") from error

    if odd:
        raise CouplerError(
            f"{path} does not hold what was written.\n"
            f"  first difference: {odd[0]}\n"
            "  look at:  the disk"
        )


def _same(one: Any, other: Any) -> bool:
    """Tell if two tensors are equal to the bit, a NaN too."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and np.array_equal(_bytes(one), _bytes(other))
    )


def _bytes(tensor: Any) -> np.ndarray:
    """Return the bytes of a tensor as [nbytes] uint8, without a copy."""
    if not isinstance(tensor, np.ndarray):
        import torch

        tensor = tensor.reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def _copy_configuration(source: Path, folder: Path) -> None:
    for pattern in COPIED:
        for path in source.glob(pattern):
            if not path.name.endswith(".safetensors.index.json"):
                shutil.copy(path, folder / path.name)


def _declare_score(path: Path, head: Head) -> None:
    """Declare one label in a config.json, so that ``score`` has one row."""
    config = read_json(path)
    kind = "TokenClassification" if head is Head.VALUE else "SequenceClassification"
    names = [name.replace("CausalLM", kind) for name in config.get("architectures") or []]
    labels = {"architectures": names, "id2label": {"0": head}, "label2id": {head: 0}}
    path.write_text(json.dumps({**config, **labels}, indent=2))
