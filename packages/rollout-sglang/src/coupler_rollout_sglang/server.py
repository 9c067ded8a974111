"""Start SGLang's HTTP server with what Coupler needs in it, for ``rollout.server``.

``python -m coupler_rollout_sglang.server MODEL PORT [host=ADDRESS] [KEY=VALUE ...]``,
where the keys are those of ``rollout=sglang`` without ``rollout.``. The environment
variable ``COUPLER_SGLANG_KEY`` has the key that requests must carry.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from typing import Any

from coupler.errors import ConfigError, CouplerError
from coupler_rollout_sglang.compat import engine as sglang
from coupler_rollout_sglang.config import SGLangConfig
from coupler_rollout_sglang.host import config_of, prepared, watch_all
from coupler_rollout_sglang.links import KEY_VARIABLE, LOOPBACK


def main(words: list[str]) -> None:
    """Serve until it is ended.

    Raises:
        ConfigError: the command line or the key is not as it must be.
    """
    if len(words) < 2 or not words[1].isdecimal():
        raise ConfigError(str(__doc__).strip())
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < 16:
        raise ConfigError(
            f"the environment variable {KEY_VARIABLE} must have a key of 16 characters or more: "
            "whoever has it can change the weights."
        )

    model, port, *options = words
    own = [word for word in options if not word.startswith("host=")]
    host = next((word.removeprefix("host=") for word in options if word not in own), LOOPBACK)

    config = configured(own)
    with tempfile.TemporaryDirectory(prefix="sgl-") as folder:
        arguments, _ = prepared(
            {
                "config": asdict(config),
                "model": model,
                "trust_remote_code": False,
                "seed": 0,
                "folder": folder,
            }
        )
        address = {"host": host, "port": int(port), "api_key": key, "admin_api_key": key}
        if os.getpgrp() != os.getpid():
            os.setsid()
        sglang.serve(arguments | address, watch_all)


def configured(words: list[str]) -> SGLangConfig:
    """Return the options of ``KEY=VALUE`` words.

    Raises:
        ConfigError: there is no such option, or a value is none for it.
    """
    defaults = asdict(SGLangConfig())
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if key not in defaults or not equals:
            names = ", ".join(defaults)
            raise ConfigError(f"{word} is no option of rollout=sglang.\n  it has:  {names}")
        given[key] = text if isinstance(defaults[key], str) else plain(text)

    try:
        return config_of(defaults | given)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def plain(text: str) -> Any:
    """Read a number, a truth value or a mapping in JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{text} is no value in JSON.") from error


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CouplerError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
