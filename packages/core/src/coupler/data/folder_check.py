"""Check the files of a model folder before anything is loaded from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from coupler.errors import ConfigError
from coupler.system.archives import check_tensors
from coupler.system.files import DamagedFile, read_bytes, read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LFS = b"version https://git-lfs.github.com/"
# A tokenizer's file that is larger takes long to parse, and is looked at by its ends.
PARSED_BYTES = 2 << 20
MAX_TEMPLATE_BYTES = 1 << 20
TOKENIZER_OBJECTS = ("tokenizer_config.json", "special_tokens_map.json")


def check_model_folder(path: str, key: str = "model.path") -> None:
    """Refuse a folder of which a file is missing, damaged or of another kind.

    Raises:
        ConfigError: the message names ``key``, the file and the way out.
    """
    folder = Path(path)
    if not path or not os.path.isdir(path):
        raise ConfigError(
            f"{key}={path[:200]!r} is no folder.\n"
            "  try:  a downloaded model, for example of:  hf download ORG/NAME "
            "--local-dir models/NAME"
        )
    check_tokenizer(folder, key)

    try:
        if not os.path.lexists(folder / "config.json"):
            raise DamagedFile(f"{folder / 'config.json'} is missing.")
        if (folder / "generation_config.json").exists():
            read_json(folder / "generation_config.json")
        if (folder / "chat_template.jinja").exists():
            read_bytes(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
        weights = _weights(folder)
        for file in weights:
            _check_weights(file)
    except DamagedFile as error:
        raise ConfigError(
            f"{error}\n  try:  downloading or saving the model of {key}={path} again"
        ) from None
    if not weights:
        raise ConfigError(
            f"{key}={path} holds neither {SINGLE} nor {INDEX}.\n  try:  save the model with "
            "save_pretrained; pickled weights are not read"
        )


def check_tokenizer(folder: Path, key: str = "model.path") -> None:
    """Refuse a folder whose tokenizer, or the configuration that names it, is damaged.

    Raises:
        ConfigError: the message names ``key`` and the file.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{key}={folder} holds no tokenizer.\n  try:  copying tokenizer.json into it"
        )

    try:
        if os.path.lexists(folder / "config.json"):
            _check_config(read_json(folder / "config.json"), folder / "config.json")
        for name in TOKENIZER_OBJECTS:
            if (folder / name).exists():
                read_json(folder / name)
        _check_tokenizer_json(folder / "tokenizer.json")
    except DamagedFile as error:
        raise ConfigError(
            f"the tokenizer of {key}={folder} cannot be loaded: {error}\n"
            "  try:  copy tokenizer.json and tokenizer_config.json of the model into "
            f"{folder} again"
        ) from None


def _check_config(config: dict[str, Any], path: Path) -> None:
    """Refuse values of another type under the keys that a model is built from."""
    inner = config.get("text_config", {})
    kinds: dict[str, type[Any]] = {
        "model_type": str,
        "architectures": list,
        "text_config": dict,
        "auto_map": dict,
        "max_position_embeddings": int,
        "vocab_size": int,
        "hidden_size": int,
        "num_hidden_layers": int,
    }

    for name, kind in kinds.items():
        for where in (config, inner if isinstance(inner, dict) else {}):
            value = where.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise DamagedFile(f"{path} is damaged: {name} is a {type(value).__name__}.")


def _check_tokenizer_json(path: Path) -> None:
    if not path.exists():
        return
    size = path.stat().st_size
    if size <= PARSED_BYTES or not path.is_file():
        read_json(path)
        return

    with path.open("rb") as file:
        start = file.read(64)
        file.seek(size - 64)
        if not start.lstrip().startswith(b"{") or not file.read().rstrip().endswith(b"}"):
            raise DamagedFile(f"{path} is damaged: it holds no JSON object.")


def _weights(folder: Path) -> list[Path]:
    """Return the files of weights that the folder names.

    Raises:
        DamagedFile: its index is damaged, or names a file that is not in the folder.
    """
    index = folder / INDEX
    if not index.exists():
        return [folder / SINGLE] if (folder / SINGLE).exists() else []

    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise DamagedFile(f"{index} is damaged: KeyError: it has no weight_map.")
    files = sorted({str(name) for name in named.values()})
    for name in files:
        if "/" in name or not name.endswith(".safetensors"):
            raise DamagedFile(f"{index} is damaged: {name[:80]!r} is no file of weights in it.")
    return [folder / name for name in files]


def _check_weights(path: Path) -> None:
    if not path.is_file():
        raise DamagedFile(f"{path} is {'no file' if path.exists() else 'missing'}.")
    with path.open("rb") as file:
        if file.read(len(LFS)) == LFS:
            raise DamagedFile(f"{path} is a pointer of Git LFS: git lfs pull fetches the weights.")
    check_tensors(path)
