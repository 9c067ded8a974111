"""Checks of torch, the driver, and GPUs. torch is imported here and nowhere else in core's own process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from coupler.plugins.finding import Finding, first_line, ok, problem, warning

GIB = 1 << 30
LEAST_FREE = 0.9  # of a GPU's memory; less means that somebody else is on it
CUDA_BUILDS = "https://download.pytorch.org/whl/"


def devices() -> Iterator[Finding]:
    """torch and its CUDA against the driver; then each GPU, and what is between them."""
    driver = driver_cuda()
    try:
        installed = version("torch")
    except PackageNotFoundError:
        yield warning("torch", "is not installed: no first-party engine or rollout runs here")
        return
    try:
        import torch
    except Exception as error:  # third-party code: whatever a broken build raises
        fix = f"pip install --force-reinstall torch=={installed.partition('+')[0]}"
        yield problem("torch", f"{installed} cannot be imported: {first_line(error)}", fix)
        return
    built = str(torch.version.cuda or "")
    text = f"{torch.__version__}, built for {'CUDA ' + built if built else 'no CUDA'}"
    if driver and not built:
        fix = f"pip install --force-reinstall torch --index-url {CUDA_BUILDS}cu{driver[0]}{driver[1]}"
        yield problem("torch", f"{text}, on a host with GPUs", fix)
        return
    yield ok("torch", text)
    if not driver:
        yield ok("GPUs", "none: tiny models train on the CPU")
    elif int(built.partition(".")[0]) > driver[0]:
        text = f"the driver knows CUDA {driver[0]}.{driver[1]}, torch is built for {built}"
        fix = f"update the NVIDIA driver, or:  pip install torch --index-url {CUDA_BUILDS}cu{driver[0]}{driver[1]}"
        yield problem("driver", text, fix)
    else:
        yield ok("driver", f"knows CUDA {driver[0]}.{driver[1]}")
        yield from gpus(torch)


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver knows, asked of the driver itself; None without a driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else (number.value // 1000, number.value % 1000 // 10)


def gpus(torch: Any) -> Iterator[Finding]:
    """Each visible GPU; with several of them, NCCL and peer-to-peer access."""
    if not torch.cuda.is_available():
        text = "there is a driver, but torch finds no GPU"
        hidden = "unset CUDA_VISIBLE_DEVICES" if not torch.cuda.device_count() else "nvidia-smi  (it says why)"
        yield problem("GPUs", text, hidden)
        return
    count = torch.cuda.device_count()
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        text = f"{torch.cuda.get_device_name(i)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        low = free < LEAST_FREE * total
        yield warning(f"GPU {i}", f"{text}: another process holds the rest") if low else ok(f"GPU {i}", text)
    if count > 1:
        yield ok("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        apart = [f"{i}-{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
        if apart:
            yield warning("peer-to-peer", f"none between GPUs {', '.join(apart[:8])}: NCCL goes through the host")
        else:
            yield ok("peer-to-peer", f"between all {count} GPUs")
