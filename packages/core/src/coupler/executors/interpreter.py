"""Compare the interpreter of a role with the controller's.

This happens before anything is started in it.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from coupler.errors import ConfigError
from coupler.executors.describe import versions
from coupler.executors.environment import forwarded
from coupler.plugins.manager import Plugins

# importing every plugin module from a cold disk takes long
DEADLINE_S = 120.0


def check_interpreter(
    kind: str, name: str, path: str, plugins: Plugins, *, pickles: bool = True
) -> None:
    """Check that ``path`` can run ``kind=name`` for this controller.

    Args:
        pickles: its messages are Ray's, which need the same Python and Ray.

    Raises:
        ConfigError: it does not start, or has another Python, Ray, core or plugin.
            The message has one line per difference.
    """
    key = f"{kind}.python={path}"
    there = _ask(key, path, f"{kind}={name}")
    here = versions()
    found = [
        f"{what} is {there[field] or 'not installed'} there and "
        f"{here[field] or 'not installed'} here"
        for field, what in (
            *((("python", "Python"), ("ray", "ray")) if pickles else ()),
            ("core", "coupler-core"),
            ("api", "API generation"),
        )
        if there[field] != here[field]
    ]

    source = plugins.owner_of(kind, name)
    rows = [row for row in there["plugins"] if (row["kind"], row["name"]) == (kind, name)]
    if not rows:
        broken = [
            f"{row['distribution']}: {row['detail']}"
            for row in there["plugins"]
            if row["state"] == "broken"
        ]
        why = f" ({'; '.join(broken)})" if broken else ""
        found.append(f"no plugin there provides {kind}={name}{why}")
    elif rows[0]["state"] != "available":
        found.append(f"{kind}={name} is {rows[0]['state']} there: {rows[0]['detail']}")
    elif source and rows[0]["version"] != source.version:
        found.append(
            f"{source.distribution} is {rows[0]['version']} there and {source.version} here"
        )
    elif wrong := there.get("unusable", {}).get(f"{kind}={name}"):
        found.append(wrong)

    if found:
        raise ConfigError(
            "\n".join([f"{key} does not fit this controller:", *(f"  {text}" for text in found)])
        )


def import_there(kind: str, name: str, path: str) -> str:
    """Import the class of ``kind=name`` with another interpreter.

    The answer says what is wrong, and is empty where nothing is.
    """
    said = _ask(f"{kind}.python={path}", path, f"{kind}={name}", "--import")
    return said.get("unusable", {}).get(f"{kind}={name}", "")


def _ask(key: str, path: str, backend: str, how: str = "--json") -> dict[str, Any]:
    environment = {**forwarded(os.environ, True, ()), "PATH": os.environ.get("PATH", "")}

    try:
        done = subprocess.run(
            [path, "-m", "coupler.executors.classes", how, backend],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{key} does not start: {error}.\n  set it to:  the path of a Python interpreter"
        ) from None

    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(
            f"{key} has no working coupler: {last}\n"
            f"  try:  {path} -m pip install coupler-core and the plugin"
        )
    return json.loads(done.stdout)
