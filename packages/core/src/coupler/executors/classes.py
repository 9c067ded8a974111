"""Find the class of a backend, or import it in the process that runs it.

``python -m coupler.executors.classes --json KIND=NAME`` tells of an interpreter what
``coupler.plugins`` does, and whether the class of a backend can exist there. With
``--import`` it is imported.
"""

from __future__ import annotations

import json
import sys

from coupler.errors import CouplerError, PluginError
from coupler.executors.describe import describe
from coupler.plugins.manager import Plugins
from coupler.system.imports import misspelt


def load_class(
    plugins: Plugins,
    kind: str,
    name: str,
) -> type:
    """Import the class of a selected backend.

    Raises:
        PluginError: it is missing, misspelt, abstract or of another type.
    """
    backend = plugins.get(kind, name)
    try:
        return backend.load()
    except CouplerError as error:
        raise _unusable(
            plugins,
            kind,
            name,
            str(error),
        ) from error


def check_spelling(
    plugins: Plugins,
    kind: str,
    name: str,
) -> None:
    """Look for the class of a selected backend, and import nothing.

    Raises:
        PluginError: its module, or the class in it, cannot exist.
    """
    target = plugins.get(kind, name).target
    if wrong := misspelt(target):
        raise _unusable(
            plugins,
            kind,
            name,
            f"its target is {target}, and {wrong}.",
        )


def unusable(
    kind: str,
    name: str,
    *,
    deeply: bool = True,
) -> str:
    """Say why a backend of this interpreter cannot be made, or nothing.

    Without ``deeply`` its class is only looked for, and nothing heavy is imported.
    """
    try:
        (load_class if deeply else check_spelling)(
            Plugins.load(),
            kind,
            name,
        )
    except PluginError as error:
        return str(error)
    return ""


def _unusable(
    plugins: Plugins,
    kind: str,
    name: str,
    text: str,
) -> PluginError:
    source = plugins.owner_of(kind, name)
    fix = f"\n  try:  {source.fix}" if source and "try:" not in text else ""
    return PluginError(f"{kind}={name} of {source} cannot be used: {text}{fix}")


def main(how: str, backend: str) -> None:
    """Print the description of this interpreter, with what is wrong with a backend."""
    # What others print when they are imported is no part of the answer.
    answer, sys.stdout = sys.stdout, sys.stderr
    kind, _, name = backend.partition("=")
    wrong = unusable(kind, name, deeply=how == "--import")
    print(
        json.dumps({**describe(), "unusable": {backend: wrong}}),
        file=answer,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
