"""What ``coupler doctor`` says about optional kernels: faster where they are, never needed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from coupler.plugins.finding import Finding, ok, problem

KERNELS = {  # module -> (distribution, what it makes faster, what runs without it)
    "flash_attn": ("flash-attn", "attention over packed sequences on a GPU", "torch's own attention"),
    "triton": ("triton", "log-probs on a GPU", "tiles of plain torch"),
}


def kernels() -> Iterator[Finding]:
    """Which kernels there are, and whether each was built for the torch that is installed."""
    for module, (dist, use, instead) in KERNELS.items():
        if find_spec(module) is None:
            yield ok(dist, f"is not installed; {use}: {instead}")
            continue
        try:
            import_module(module)
        except Exception as error:  # third-party code: a kernel of another torch raises ImportError, OSError and more
            text = f"is installed but cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
            yield problem(dist, text, f"pip install --force-reinstall --no-build-isolation --no-deps {dist}")
        else:
            yield ok(dist, f"is there, for {use}")
