"""Look for packages of kernels, which are faster but never needed."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

# Core prints what loggers below its own are told.
log = logging.getLogger(f"coupler.{__name__}")


def is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def import_error(module: str) -> str:
    """Return why a module cannot be imported, as one line, or an empty text."""
    try:
        import_module(module)
    # This is third-party code: a kernel of another torch raises ImportError, OSError
    # and more.
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def is_usable(distribution: str, module: str) -> bool:
    """Tell whether a package is there and works. A broken one leaves a warning."""
    if not is_installed(distribution):
        return False
    if why := import_error(module):
        log.warning(f"{distribution} is installed but cannot be imported, and not used: {why}.")
    return not why
