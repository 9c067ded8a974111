"""Tell ``coupler doctor`` about optional kernels, which are faster but never needed."""

from __future__ import annotations

from collections.abc import Iterator

from coupler.plugins.finding import Finding, ok, problem
from coupler_engine_fsdp.optional import import_error, is_installed

ATTENTION = "attention over packed sequences on a GPU"
OF_THIS_TORCH = "pip install --force-reinstall --no-build-isolation --no-deps"
KERNELS = {
    "flash-attn": ("flash_attn", ATTENTION, "torch's own attention", OF_THIS_TORCH),
    "flash-attn-4": (
        "flash_attn.cute.interface",
        f"{ATTENTION} of Hopper or later",
        "flash-attn, or torch's own attention",
        "pip install --force-reinstall",
    ),
    "triton": ("triton", "log-probs on a GPU", "tiles of plain torch", OF_THIS_TORCH),
}
"""By distribution: its module, what it makes faster, what runs without it, and the
command that repairs it.
"""


def kernels() -> Iterator[Finding]:
    """Yield which kernels there are, and if each fits the torch that is installed."""
    for dist, (module, use, instead, repair) in KERNELS.items():
        if not is_installed(dist):
            yield ok(dist, f"is not installed; {use}: {instead}")
        elif why := import_error(module):
            yield problem(
                dist,
                f"is installed but cannot be imported: {why}",
                f"{repair} {dist}",
            )
        else:
            yield ok(dist, f"is there, for {use}")
