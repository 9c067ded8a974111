"""Check torch, the driver and the GPUs.

torch is imported here, and nowhere else in the process of the user.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from coupler.plugins.finding import Finding, first_line, ok, problem, warning

GIB = 1 << 30
# Less than this share of free memory means that another process is on the GPU.
LEAST_FREE = 0.9
CUDA_BUILDS = "https://download.pytorch.org/whl/"


def devices() -> Iterator[Finding]:
    """Check torch and its CUDA against the driver, then each GPU."""
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
        index = f"{CUDA_BUILDS}cu{driver[0]}{driver[1]}"
        fix = f"pip install --force-reinstall torch --index-url {index}"
        yield problem("torch", f"{text}, on a host with GPUs", fix)
        return
    yield ok("torch", text)

    if not driver:
        yield ok("GPUs", "none: tiny models train on the CPU")
    elif int(built.partition(".")[0]) > driver[0]:
        index = f"{CUDA_BUILDS}cu{driver[0]}{driver[1]}"
        yield problem(
            "driver",
            f"the driver knows CUDA {driver[0]}.{driver[1]}, torch is built for {built}",
            f"update the NVIDIA driver, or:  pip install torch --index-url {index}",
        )
    else:
        yield ok("driver", f"knows CUDA {driver[0]}.{driver[1]}")
        yield from gpus(torch)


def driver_cuda() -> tuple[int, int] | None:
    """Ask the NVIDIA driver for the newest CUDA that it knows.

    It is None where there is no driver.
    """
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else (number.value // 1000, number.value % 1000 // 10)


def gpus(torch: Any) -> Iterator[Finding]:
    """Check each visible GPU, and how several of them reach each other."""
    if not torch.cuda.is_available():
        counted = torch.cuda.device_count()
        yield problem(
            "GPUs",
            "there is a driver, but torch finds no GPU",
            "nvidia-smi  (it says why)" if counted else "unset CUDA_VISIBLE_DEVICES",
        )
        return

    count = torch.cuda.device_count()
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        text = f"{torch.cuda.get_device_name(i)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if free < LEAST_FREE * total:
            yield warning(f"GPU {i}", f"{text}: another process holds the rest")
        else:
            yield ok(f"GPU {i}", text)

    if count > 1:
        yield ok("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        apart = [f"{i}-{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
        if apart:
            yield warning(
                "peer-to-peer",
                f"none between GPUs {', '.join(apart[:8])}: NCCL goes through the host",
            )
        else:
            yield ok("peer-to-peer", f"between all {count} GPUs")
