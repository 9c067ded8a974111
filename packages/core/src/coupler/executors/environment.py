"""Choose the environment of workers, and of Ray itself."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from coupler.errors import PlacementError

# of this process, this terminal, or this machine
DENIED = frozenset({
    "_", "COLUMNS", "DISPLAY", "HOME", "HOSTNAME", "LINES", "LOGNAME", "LS_COLORS", "MAIL",
    "OLDPWD", "PATH", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "VIRTUAL_ENV",
    "PYTHONHOME", "PYTHONSTARTUP", "PYTHONBREAKPOINT", "LD_PRELOAD", "RANK", "LOCAL_RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
})  # fmt: skip
DENIED_STARTS = (
    "RAY_",
    "SSH_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "TORCHELASTIC_",
    "CONDA_",
    "XDG_",
    "DBUS_",
)


def forwarded(
    environment: Mapping[str, str], own_interpreter: bool, devices: tuple[str, ...]
) -> dict[str, str]:
    """Return the environment of one worker.

    It is the controller's without the names that are denied, and with the devices that
    the worker may see.

    Args:
        own_interpreter: the packages of the worker are its own, so nothing that points
            Python at ours is forwarded.
        devices: UUIDs. Without any, every GPU is hidden.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name not in DENIED and not name.startswith(DENIED_STARTS)
    }
    if own_interpreter:
        kept |= {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}

    # Ray hides every GPU from an actor that reserves none, and here its bundle has
    pinned = {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
    }
    return kept | pinned


@cache
def token() -> str:
    """Return the secret of the clusters that this process starts.

    Ray reads one per process.
    """
    return secrets.token_hex(32)


@contextmanager
def of_ray(starts: bool) -> Iterator[None]:
    """Set the variables that Ray reads while it is imported and started.

    A cluster of our own listens on loopback only and asks for a random token. The token
    is taken back afterwards, so that child processes of the controller do not inherit
    it. To join a cluster, Ray finds the user's token itself.

    Raises:
        PlacementError: Ray was imported before, and has read that it needs no token.
    """
    loaded = sys.modules.get("ray")
    if (
        starts
        and loaded
        and not loaded.is_initialized()
        and os.environ.get("RAY_AUTH_MODE") != "token"
    ):
        raise PlacementError(
            "executor=ray starts Ray with a token, and something in this process imported Ray "
            "before that was said.\n"
            "  set:  RAY_AUTH_MODE=token before the first import of Ray, which other "
            "libraries import too"
        )

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before = os.environ.get("RAY_AUTH_TOKEN")
    if starts:
        os.environ["RAY_AUTH_MODE"] = "token"
        # Ray's name for: take 127.0.0.1 as this node's address
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_TOKEN"] = token()
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "token")

    try:
        yield
    finally:
        if starts and before is None:
            del os.environ["RAY_AUTH_TOKEN"]
        elif starts and before is not None:
            os.environ["RAY_AUTH_TOKEN"] = before
