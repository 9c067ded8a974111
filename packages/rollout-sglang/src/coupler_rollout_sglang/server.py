"""Start SGLang's HTTP server with what Coupler needs in it, for ``rollout.server``.

``python -m coupler_rollout_sglang.server MODEL PORT [host=ADDRESS] [KEY=VALUE ...]``,
where the keys are those of ``rollout=sglang`` without ``rollout.``. The environment
variable ``COUPLER_SGLANG_KEY`` has the key that requests must carry.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coupler.errors import ConfigError, CouplerError
from coupler_rollout_sglang.compat import engine as sglang
from coupler_rollout_sglang.config import SGLangConfig
from coupler_rollout_sglang.host import prepared, watch_all
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
    try:
        given = OmegaConf.from_dotlist(words)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SGLangConfig), given))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    assert isinstance(config, SGLangConfig)
    return config


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CouplerError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
