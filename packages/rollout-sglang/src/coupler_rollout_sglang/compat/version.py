"""Find SGLang, and prepare a process for it before anything imports it there."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from coupler.errors import PluginError
from coupler_rollout_sglang.plugin import RANGE

DEFAULTS = {
    # Our own limit is that of the model; SGLang keeps some positions to itself.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # A GPU host's own cuDNN is used by convolutions alone, which no model here has.
    "SGLANG_DISABLE_CUDNN_CHECK": "1",
    # NCCL's own choice, as an engine has it. Where the variable is missing SGLang sets
    # 0, and two sides that allocate differently cannot map each other's memory.
    "NCCL_CUMEM_ENABLE": "-2",
}
ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # No kernel of the CPU is worth a compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


class SGLangMissing(PluginError, ModuleNotFoundError):
    """Say that SGLang is not installed in this interpreter."""

    name = "sglang"


def installed() -> str:
    """Return the version of SGLang.

    Raises:
        SGLangMissing: there is none.
        PluginError: it is outside the tested range.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise SGLangMissing(
            "rollout=sglang needs SGLang, which this interpreter has not.\n"
            "  try:  pip install 'coupler-rollout-sglang[cuda]'\n"
            "  or:   set rollout.python to an interpreter that has it"
        ) from None

    if not SpecifierSet(RANGE).contains(found.partition("+")[0], prereleases=True):
        raise PluginError(
            f"sglang {found} is outside the range {RANGE} that rollout=sglang was tested with.\n"
            f"  try:  pip install 'sglang{RANGE}'"
        )
    return found


def prepare(*, gpu: bool) -> None:
    """Set the variables that SGLang reads when it is imported.

    Its processes inherit them. A variable that is set already stays.
    """
    for name, value in (DEFAULTS if gpu else DEFAULTS | ON_CPU).items():
        os.environ.setdefault(name, value)
