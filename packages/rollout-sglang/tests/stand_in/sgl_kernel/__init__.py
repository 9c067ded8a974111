"""Stand in for SGLang's compiled kernels on the CPU, where there are none.

SGLang imports names of it that the CPU never calls. Calling one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a kernel for GPUs")

    return absent
