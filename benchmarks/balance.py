"""Balance sequences over shards by tokens: time and imbalance on lognormal lengths.

python benchmarks/balance.py
"""

from __future__ import annotations

import platform
import time

import numpy as np

from coupler.batch.partition import balance

REPEATS = 15


def main() -> None:
    print(
        f"Python {platform.python_version()}, NumPy {np.__version__}, "
        f"{platform.processor() or platform.machine()}"
    )
    print("| n | k | sigma | median ms | worst max/mean - 1 |\n|---|---|---|---|---|")
    for n in (16_384, 32_768):
        for k in (2, 8, 32, 64, 256):
            for sigma in (0.5, 1.0, 1.5):
                seconds, imbalance = zip(
                    *(measure(n, k, sigma, seed) for seed in range(REPEATS)), strict=True
                )
                print(
                    f"| {n:,} | {k} | {sigma} | {1e3 * np.median(seconds):.1f} | "
                    f"{max(imbalance):.1e} |"
                )


def measure(n: int, k: int, sigma: float, seed: int) -> tuple[float, float]:
    """Seconds of one call, and how much heavier the heaviest shard is than the mean."""
    lengths = np.random.default_rng(seed).lognormal(6, sigma, n).clip(1, 32_768).astype(np.int64)
    start = time.perf_counter()
    parts = balance(lengths, k)
    seconds = time.perf_counter() - start
    loads = np.array([lengths[part].sum() for part in parts])
    return seconds, float(loads.max() / loads.mean() - 1)


if __name__ == "__main__":
    main()
