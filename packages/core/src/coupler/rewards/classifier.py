"""Read whether a model folder holds a sequence classifier with one label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from coupler.errors import ConfigError
from coupler.system.files import DamagedFile, read_json

HEAD, KEY = "score.weight", "reward_model.model.path"
ENDING = "ForSequenceClassification"


def check_classifier(folder: Path) -> dict[str, Any]:
    """Return the config.json of a sequence classifier with one label.

    Raises:
        ConfigError: the folder has none. Its head is never made up.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{KEY}={folder} is no folder with config.json.\n"
            "  try:  the folder of a sequence classifier in Hugging Face layout"
        )
    try:
        config: dict[str, Any] = read_json(path)
    except DamagedFile as error:
        raise ConfigError(f"{KEY}={folder}: {error}") from None

    names = [str(name) for name in config.get("architectures") or []]
    if names and not any(name.endswith(ENDING) for name in names):
        raise ConfigError(
            f"{KEY}={folder} holds a {names[0]}, which gives no score.\n"
            f"  try:  a model that was saved as ...{ENDING}, with one label"
        )

    shape = _shape_of_head(folder)
    if not shape:
        raise ConfigError(
            f"{KEY}={folder} has no tensor {HEAD}: its head is not in the folder, or has another "
            "name.\n"
            f"  try:  a decoder that was saved as ...{ENDING}, with one label"
        )
    if len(shape) != 2 or shape[0] != 1:
        raise ConfigError(
            f"{KEY}={folder} has a head {HEAD} of shape {list(shape)}, and a reward needs one "
            "label.\n"
            "  try:  a classifier that was trained with num_labels=1"
        )
    return config


def _shape_of_head(folder: Path) -> tuple[int, ...]:
    """Return the shape of the head, or nothing where no file holds it."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                if HEAD in file.keys():  # noqa: SIM118
                    return tuple(file.get_slice(HEAD).get_shape())
        except SafetensorError as error:
            raise ConfigError(f"{KEY}={folder}: {path.name} is damaged: {error}") from None
    return ()
