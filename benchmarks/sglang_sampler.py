"""Time of the kernel of rollout=sglang that samples, against the same in PyTorch and
against reading the logits once.

    python benchmarks/sglang_sampler.py                  # on a GPU, with SGLang
    python benchmarks/sglang_sampler.py --rows 64 --vocab 49152

The bound is a sum over the logits in bf16, which reads each number once. "PyTorch" is a
softmax in float32, SGLang's own ``multinomial_with_seed`` and the log-probs of what it
sampled. The last line counts how often that function sampled one of 1,000,000 tokens
that together have a probability of 2e-7.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from sglang.srt.layers.sampler import multinomial_with_seed

from coupler_rollout_sglang.worker.fused import draw

ROUNDS = 30


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time on the GPU, warm."""
    found = []
    for _ in range(ROUNDS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        found.append(begun.elapsed_time(ended))
    return statistics.median(found[3:])


def rare(sample: Callable[..., torch.Tensor], tokens: int = 1_000_000, rows: int = 200) -> int:
    """Count samples of ``tokens`` tokens that all but never come."""
    logits = torch.full((rows, tokens), -29.2, device="cuda")
    logits[:, 0] = 0.0
    each = torch.arange(rows, device="cuda")
    found = [sample(logits, each, each + 1000 * i).view(-1) for i in range(20)]
    return int((torch.cat(found) != 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151_936)
    args = parser.parse_args()

    torch.manual_seed(0)
    logits = (3 * torch.randn(args.rows, args.vocab, device="cuda")).bfloat16()
    ones = torch.ones(args.rows, 1, device="cuda")
    greedy = torch.zeros(args.rows, dtype=torch.bool, device="cuda")
    each = torch.arange(args.rows, device="cuda")

    def in_pytorch() -> torch.Tensor:
        logprobs = torch.log_softmax(logits.float() / ones, dim=-1)
        tokens = multinomial_with_seed(logprobs, each, each)
        return logprobs.gather(-1, tokens)

    bound = milliseconds(lambda: logits.sum(-1))
    kernel = milliseconds(lambda: draw(logits, ones, greedy, each, each))
    pytorch = milliseconds(in_pytorch)
    print(
        f"RESULT {args.rows} rows of {args.vocab}: {kernel:.3f} ms, {kernel / bound:.1f} of "
        f"reading them ({bound:.3f} ms); PyTorch {pytorch:.3f} ms"
    )

    def ours(rows: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        whole = torch.ones(len(rows), device="cuda")
        return draw(rows, whole, torch.zeros_like(whole, dtype=torch.bool), seeds, positions)[0]

    print(f"RESULT rare tokens of 4,000: ours {rare(ours)}, SGLang's {rare(multinomial_with_seed)}")


if __name__ == "__main__":
    main()
