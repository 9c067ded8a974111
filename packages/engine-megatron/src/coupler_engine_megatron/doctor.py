"""What stands in for CUDA where engine=megatron would run on the CPU, for ``coupler doctor``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from coupler.errors import CouplerError
from coupler.plugins.finding import Finding, from_error, ok
from coupler_engine_megatron import cpu


def stand_ins() -> Iterator[Finding]:
    """Each place where something is replaced while the engine computes, and what; nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    try:
        cpu.check_version()
    except CouplerError as error:
        yield from_error("megatron", error, f"pip install 'megatron-core=={cpu.TESTED[-1]}.*'")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core says at its import what it does without a GPU's libraries
        replaced = cpu.replaced()
    for owner, names in replaced.items():
        yield ok("megatron", f"on the CPU {owner} has stand-ins for {', '.join(names)}")
