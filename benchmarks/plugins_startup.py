"""How long ``coupler plugins`` takes, against Python's own start, and which heavy
modules it imports (it must be none).

python benchmarks/plugins_startup.py [RUNS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

HEAVY = (
    "torch",
    "ray",
    "transformers",
    "vllm",
    "sglang",
    "megatron",
    "hydra",
    "omegaconf",
    "rich",
    "pyarrow",
)
LISTING = "import sys; from coupler.cli import main; code = main(['plugins'])"
SHOW = (
    f"; print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr); sys.exit(code)"
)


def seconds(code: str) -> tuple[float, float]:
    """Wall and CPU seconds of one interpreter; on a busy machine only the second says
    something.
    """
    start, used = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    now = os.times()
    cpu = now.children_user + now.children_system - used.children_user - used.children_system
    return time.perf_counter() - start, cpu


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    for label, code in (
        ("python -c pass", "pass"),
        ("import numpy", "import numpy"),
        ("import coupler", "import coupler"),
        ("coupler plugins", LISTING),
    ):
        wall, cpu = (
            statistics.median(times)
            for times in zip(*(seconds(code) for _ in range(runs)), strict=True)
        )
        print(f"{label:16} {wall:.3f} s, of CPU {cpu:.3f} s (medians of {runs})")
    shown = subprocess.run(
        [sys.executable, "-c", LISTING + SHOW], check=True, capture_output=True, text=True
    )
    imported = shown.stderr.splitlines()[-1].split()
    print(f"heavy modules    {', '.join(imported) or 'none'}")
    sys.exit(bool(imported))


if __name__ == "__main__":
    main()
