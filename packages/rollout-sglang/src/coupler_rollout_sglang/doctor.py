"""Check an installation of SGLang for ``coupler doctor``, without importing SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement

from coupler.engine_kit import gpu_is_visible
from coupler.plugins.finding import Finding, first_line, ok, problem, warning
from coupler_rollout_sglang.config import SGLangConfig

KERNELS = ("sglang-kernel", "sgl-kernel")
"""Distributions that hold SGLang's compiled kernels, the newest name first."""
MODULES = {"fa3": "sgl_kernel", "fa4": "flash_attn", "flashinfer": "flashinfer", "triton": "triton"}
"""The module that each attention backend needs."""
EXACT = ("torch", *KERNELS, "flashinfer-python", "transformers")
"""Requirements of SGLang that its compiled code depends on."""


def findings(config: SGLangConfig) -> Iterator[Finding]:
    """Yield what was found: SGLang, its kernels beside torch, cuDNN, attention.

    With an interpreter of its own, or a server elsewhere, nothing here counts.
    """
    if config.python or config.server:
        elsewhere = config.python or config.server
        yield ok("sglang", f"is elsewhere ({elsewhere}); this interpreter is not checked")
        return
    try:
        yield ok("sglang", version("sglang"))
    except PackageNotFoundError:
        yield problem("sglang", "is not installed", "pip install 'coupler-rollout-sglang[cuda]'")
        return

    yield from _requirements()
    yield _kernels()
    if gpu_is_visible():
        yield _cudnn()
    if config.attention_backend:
        yield _attention(config.attention_backend)


def _requirements() -> Iterator[Finding]:
    """Compare what SGLang was compiled for with what is installed."""
    for text in requires("sglang") or []:
        wanted = Requirement(text)
        if wanted.name.replace("_", "-") not in EXACT or (
            wanted.marker is not None and not wanted.marker.evaluate()
        ):
            continue

        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            yield warning(f"sglang's {wanted.name}", f"{wanted.specifier} is not installed")
            continue
        if not wanted.specifier.contains(found.partition("+")[0], prereleases=True):
            yield warning(
                f"sglang's {wanted.name}",
                f"{found} is not {wanted.specifier}, which SGLang was built for; compiled kernels "
                "may not load",
            )


def _kernels() -> Finding:
    """Load the compiled kernels: built for another torch, they do not load."""
    name = next((name for name in KERNELS if _has(name)), "")
    if not name and find_spec("sgl_kernel") is None:
        fix = "pip install 'coupler-rollout-sglang[cuda]'"
        return problem("sgl_kernel", "SGLang's kernels are not installed", fix)
    if not name:
        return warning("sgl_kernel", "a stand-in without kernels: for tests on the CPU alone")

    try:
        import sgl_kernel  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError, RuntimeError) as error:
        text = f"{name} {version(name)} does not load beside torch {version('torch')}: "
        return problem(
            "sgl_kernel", text + first_line(error), "pip install --force-reinstall sglang"
        )
    found = getattr(sgl_kernel, "__version__", version(name))
    return ok("sgl_kernel", f"{found}, loads beside torch {version('torch')}")


def _cudnn() -> Finding:
    """Say which cuDNN torch has. SGLang refuses some for convolutions."""
    import torch

    found = torch.backends.cudnn.version()
    if found is None:
        return warning("cudnn", "torch has none; models with convolutions are slow")
    return ok("cudnn", f"{found // 10000}.{found // 100 % 100}, for models with convolutions")


def _attention(name: str) -> Finding:
    module = MODULES.get(name)
    if module is None:
        return ok("attention", f"{name} is not known to Coupler; SGLang checks it at its start")
    if find_spec(module) is None:
        fix = "set rollout.attention_backend= for SGLang's own choice"
        return problem("attention", f"{name} needs {module}, which is not installed", fix)
    return ok("attention", f"{name} by {module}")


def _has(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
