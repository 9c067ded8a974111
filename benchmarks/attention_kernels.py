"""Time causal attention over one long sequence, by each kernel of PyTorch.

    python benchmarks/attention_kernels.py --heads 12 --kv-heads 2 32768 8192

For each length it prints milliseconds and TFLOP/s of the forward pass, and of forward
and backward together, whose FLOPs are counted as 3.5 times the forward pass. Half of
the square is computed. ``varlen`` is what engine=fsdp calls where no flash-attn is
installed. It needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

HEAD_DIM = 128
REPEATS = 5
GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def milliseconds(call: Callable[[], object]) -> float:
    """The median of :data:`REPEATS` calls, after two."""
    times = []
    for _ in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[N, heads, D] by the kernel for packed sequences, of which there is one."""
    size = len(query)
    edges = torch.tensor([0, size], device=query.device, dtype=torch.int32)
    out = varlen_attn(query, key, value, edges, edges, size, size, window_size=(-1, 0), **GROUPED)
    assert isinstance(out, Tensor)
    return out


def dense(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """[N, heads, D] by one kernel of ``scaled_dot_product_attention``."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        inputs = (x.transpose(0, 1)[None] for x in (query, key, value))
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return call


KERNELS = {
    "varlen": varlen,
    "flash": dense(SDPBackend.FLASH_ATTENTION),
    "cudnn": dense(SDPBackend.CUDNN_ATTENTION),
}


def compare(size: int, heads: int, kv_heads: int) -> None:
    """Print a line for each kernel."""

    def made(number: int) -> Tensor:
        shape = (size, number, HEAD_DIM)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    inputs = (made(heads), made(kv_heads), made(kv_heads))
    upstream = torch.randn_like(inputs[0])
    flops = 2.0 * heads * HEAD_DIM * size**2

    for name, kernel in KERNELS.items():
        forward = milliseconds(lambda kernel=kernel: kernel(*inputs))
        both = milliseconds(
            lambda kernel=kernel: torch.autograd.grad(kernel(*inputs), inputs, upstream)
        )
        rates = (flops / forward / 1e9, 3.5 * flops / both / 1e9)
        print(
            f"{size:7} tokens  {name:7} forward {forward:7.2f} ms {rates[0]:4.0f} TFLOP/s  "
            f"and backward {both:7.2f} ms {rates[1]:4.0f} TFLOP/s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokens", nargs="+", type=int)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=2)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for size in args.tokens:
        compare(size, args.heads, args.kv_heads)


if __name__ == "__main__":
    main()
