"""Log-probs and entropy without the logits: peak memory and speed against the full
logits.

    python benchmarks/logprob_memory.py                       # a GPU: T=4096, V=151936,
    H=2048, bf16 python benchmarks/logprob_memory.py --device cpu --tokens 512 --hidden
    896 --dtype float32

"extra" is the peak above inputs and their gradients, in percent of the fp32 logits [T,
V]. On the CPU it is summed from PyTorch's own record of allocations. "time" is forward
and backward, the median of several, as a multiple of the full logits'. "error" is
max|dg| / max|g| of the gradient of hidden states and head, against the full logits in
fp64 (where they fit; fp32 else).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from coupler_engine_fsdp.logprobs import token_logprobs

Run = Callable[[], tuple[Tensor, ...]]


def full_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, entropy: bool
) -> tuple[Tensor, ...]:
    """What frameworks compute: logits, fp32, log_softmax, gather."""
    log_p = ((hidden @ weight.t()).float() / temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(
        -1
    ) if entropy else None


def step(
    function: Callable, leaves: list[Tensor], targets: Tensor, temperature: Tensor, entropy: bool
) -> list[Tensor]:
    """Forward and backward with an upstream gradient that differs from token to
    token.
    """
    logprobs, values, *_ = function(*leaves, targets, temperature, entropy)
    slope = torch.linspace(-1, 1, len(logprobs), device=logprobs.device, dtype=logprobs.dtype)
    total = (logprobs * slope).sum() + ((values * slope.flip(0)).sum() if entropy else 0)
    return list(torch.autograd.grad(total, leaves))


def seconds(run: Run, device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def peak_bytes(run: Run, device: torch.device) -> int:
    """Peak above what stood before, less the gradients that remain."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        grads = run()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            grads = run()
        changes = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
        total = peak = 0
        for event in sorted(changes, key=lambda e: e.start_ns()):
            total += event.nbytes()
            peak = max(peak, total)
    return peak - sum(g.numel() * g.element_size() for g in grads)


def error(got: list[Tensor], want: list[Tensor]) -> float:
    return max(
        float((g.to(w) - w).abs().max() / w.abs().max()) for g, w in zip(got, want, strict=True)
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument(
        "--tile", type=int, nargs="*", default=[0], help="elements; 0 is the default choice"
    )
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.hidden, device=device)
    weight = (
        torch.randn(arguments.vocabulary, arguments.hidden, device=device)
        * 3
        * arguments.hidden**-0.5
    )
    leaves = [leaf.to(dtype).requires_grad_() for leaf in (hidden, weight)]
    targets = torch.randint(0, arguments.vocabulary, (arguments.tokens,), device=device)
    temperature = torch.rand(arguments.tokens, device=device) + 0.5
    logits_bytes = 4 * arguments.tokens * arguments.vocabulary
    del hidden, weight
    shape = f"T={arguments.tokens} H={arguments.hidden} V={arguments.vocabulary}"
    print(f"{device} {torch.get_num_threads()} threads, {dtype}, {shape}")
    print(f"{'method':>22} {'entropy':>8} {'extra %':>8} {'ms':>9} {'time':>6} {'error':>9}")
    for entropy in (False, True):
        data = (targets, temperature, entropy)
        exact = [
            leaf.detach().to(torch.float64 if device.type == "cuda" else torch.float32)
            for leaf in leaves
        ]
        want = [g.float() for g in step(token_exact, [e.requires_grad_() for e in exact], *data)]
        methods = {"full logits": full_logits}
        for tile in arguments.tile:
            methods[f"tile {tile or 'default'}"] = lambda *a, tile=tile: token_logprobs(
                a[0], a[1], None, *a[2:], tile
            )
        base = 0.0
        for name, function in methods.items():
            run = partial(step, function, leaves, *data)
            wrong = error(run(), want)
            extra = 100 * peak_bytes(run, device) / logits_bytes
            taken = seconds(run, device, arguments.repeats)
            base = base or taken
            print(
                (
                    f"{name:>22} {entropy!s:>8} {extra:>8.2f} {1e3 * taken:>9.1f} "
                    f"{taken / base:>6.2f} {wrong:>9.1e}"
                ),
                flush=True,
            )


def token_exact(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, entropy: bool
) -> tuple[Tensor, ...]:
    """The full logits in blocks of rows, each differentiated by itself: fp64 would not
    fit otherwise.
    """
    outs = [
        torch.utils.checkpoint.checkpoint(_exact_rows, *rows, weight, entropy, use_reentrant=False)
        for rows in zip(hidden.split(256), targets.split(256), temperature.split(256), strict=True)
    ]
    return torch.cat([o[0] for o in outs]), torch.cat([o[1] for o in outs]) if entropy else None


def _exact_rows(
    hidden: Tensor, targets: Tensor, temperature: Tensor, weight: Tensor, entropy: bool
) -> tuple[Tensor, ...]:
    log_p = ((hidden @ weight.t()) / temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(
        -1
    ) if entropy else None


if __name__ == "__main__":
    main()
