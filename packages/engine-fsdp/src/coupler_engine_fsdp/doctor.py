"""Tell ``coupler doctor`` about optional kernels, which are faster but never needed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from coupler.plugins.finding import Finding, ok, problem

KERNELS = {
    "flash_attn": (
        "flash-attn",
        "attention over packed sequences on a GPU",
        "torch's own attention",
    ),
    "triton": ("triton", "log-probs on a GPU", "tiles of plain torch"),
}
"""By module: the distribution, what it makes faster, and what runs without it."""


def kernels() -> Iterator[Finding]:
    """Yield which kernels there are, and if each fits the torch that is installed."""
    for module, (dist, use, instead) in KERNELS.items():
        if find_spec(module) is None:
            yield ok(dist, f"is not installed; {use}: {instead}")
            continue

        try:
            import_module(module)
        # This is third-party code: a kernel of another torch raises ImportError,
        # OSError and more.
        except Exception as error:
            text = f"is installed but cannot be imported: {type(error).__name__}: {error}"
            yield problem(
                dist,
                text.splitlines()[0],
                f"pip install --force-reinstall --no-build-isolation --no-deps {dist}",
            )
        else:
            yield ok(dist, f"is there, for {use}")
