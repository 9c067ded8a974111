"""Find the renderer of the library that was written for a model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from coupler.conversation import Codec
from coupler.engine_kit.json_files import DamagedFile, read_json
from coupler.errors import ConfigError, CouplerError

CACHED = "models--"  # folders of the Hugging Face cache: models--ORG--NAME/snapshots/HASH


def library() -> Any:
    """Import the library.

    Raises:
        CouplerError: it is not installed.
    """
    try:
        return import_module("renderers")
    except ImportError as error:
        raise CouplerError(
            f"the renderers library cannot be imported: {error}\n"
            "  install:  pip install 'coupler-agents[renderers]'"
        ) from None


def find_family(codec: Codec, wanted: str) -> tuple[str, str]:
    """Return the name of a renderer, and the name on the hub of the model it is for.

    The library knows models by their names on the hub. Here a model is a folder, whose
    name, place in the cache and config.json are looked at.

    Args:
        wanted: the name of a renderer, or nothing to find it.

    Raises:
        ConfigError: there is no such renderer.
        CouplerError: the library does not know the model.
    """
    base = library().base
    base._populate_registry()  # importing the families is put off until then
    families = sorted(base.RENDERER_REGISTRY.keys() - {"default"})
    known: Mapping[str, str] = base.MODEL_RENDERER_MAP

    if wanted and wanted not in families:
        raise ConfigError(
            f"environment.renderer=renderers:{wanted}: the library has no such renderer.\n"
            f"  it has:  {', '.join(families)}"
        )
    hub = next((found for name in _names(codec.folder) if (found := _on_hub(name, known))), "")
    if not wanted and not hub:
        raise CouplerError(
            f"the renderers library does not know the model of {codec.folder} by its name.\n"
            "  set:  environment.renderer=renderers:FAMILY, if it is of one of these: "
            f"{', '.join(families)}"
        )
    return wanted or known[hub], hub


def make(codec: Codec, family: str, tokenizer: Any) -> Any:
    """Make a renderer of the library, which goes on behind reasoning of any turn.

    Raises:
        CouplerError: it cannot be made for this tokenizer.
    """
    from_library = library()
    try:
        config = type(from_library.config_from_name(family))(thinking_retention="all")
        return from_library.create_renderer(tokenizer, config)
    except Exception as error:  # the library asserts what it needs of a tokenizer
        text = f"{type(error).__name__}: {error}"
        raise CouplerError(
            f"the renderer {family} cannot be made for {codec.folder}: {text:.500}"
        ) from None


def _names(folder: Path) -> list[str]:
    """Return what the model of a folder may be called."""
    found = [str(folder), folder.name]
    for part in folder.parts:
        if part.startswith(CACHED):
            found.append(part.removeprefix(CACHED).replace("--", "/"))

    try:
        name = read_json(folder / "config.json").get("_name_or_path")
    except DamagedFile:
        return found
    return [*found, name] if isinstance(name, str) and name else found


def _on_hub(name: str, known: Mapping[str, str]) -> str:
    """Return the name on the hub that is ``name``, or that ends with it."""
    if name in known:
        return name
    last = name.rpartition("/")[2].lower()
    return next((each for each in known if each.rpartition("/")[2].lower() == last), "")
