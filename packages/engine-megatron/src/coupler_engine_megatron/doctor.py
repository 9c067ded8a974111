"""Tell ``coupler doctor`` what replaces CUDA when engine=megatron runs on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from coupler.errors import CouplerError
from coupler.plugins.finding import Finding, from_error, ok
from coupler_engine_megatron import cpu


def stand_ins() -> Iterator[Finding]:
    """Yield each place where something is replaced while the engine computes.

    Nothing is replaced if there is a GPU.
    """
    if torch.cuda.is_available():
        return
    try:
        cpu.check_version()
    except CouplerError as error:
        yield from_error("megatron", error, f"pip install 'megatron-core=={cpu.TESTED[-1]}.*'")
        return

    # At its import, Megatron-Core says what it does without a GPU's libraries.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replaced = cpu.replaced()
    for owner, names in replaced.items():
        yield ok("megatron", f"on the CPU {owner} has stand-ins for {', '.join(names)}")
