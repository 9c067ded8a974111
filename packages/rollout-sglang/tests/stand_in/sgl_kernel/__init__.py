"""Stand in for SGLang's compiled kernels on the CPU, where there are none.

SGLang imports names of it that the CPU never calls. Calling one is an error.

For adapters and routes SGLang pins memory, which torch and CUDA refuse where there is
no GPU. There, it is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a kernel for GPUs")

    return absent


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let a function of torch make its tensor without pinning it."""

    def made(*args: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return make(*args, **named)

    return made


class Unpinned:
    """Take the place of CUDA's runtime, and leave memory of the host as it is."""

    @staticmethod
    def cudaHostRegister(*_: Any) -> int:
        return 0

    cudaHostUnregister = cudaHostRegister


if not torch.cuda.is_available():
    torch.cuda.cudart = Unpinned
    torch.tensor, torch.zeros = unpinned(torch.tensor), unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
