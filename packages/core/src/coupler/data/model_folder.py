"""Find the folder of a model: a path, or the result of a user's function."""

from __future__ import annotations

import os

from coupler.data.hub import fetch, is_name
from coupler.errors import ConfigError, CouplerError
from coupler.system.imports import resolve


def model_folder(path: str, key: str = "model") -> str:
    """Return the folder that ``KEY.path`` names: itself, the result of the function
    ``pkg.mod:name``, or that of a model of the Hugging Face Hub, ``ORG/NAME``.

    Raises:
        ConfigError: there is no such function, or it raised.
        CouplerError: there is no such model, or it cannot be had.
    """
    if os.path.exists(path):
        return path
    if is_name(path):
        return str(fetch(path, f"{key}.path"))
    if ":" not in path:
        return path

    try:
        function = resolve(path)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ConfigError(
            f"{key}.path={path} is no folder, and no function either: {error}"
        ) from None
    try:
        return str(function())
    except CouplerError:
        raise
    except (Exception, SystemExit) as error:  # code of the user
        raise ConfigError(f"{key}.path={path} names a function that raised {error!r}.") from error
