"""How long ``coupler plugins`` takes, against Python's own start, and which heavy
modules it imports (it must be none); and what a plugin that hangs while it is imported
costs the plan of a run that does not select it.

python benchmarks/plugins_startup.py [RUNS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from coupler.testing.models import write_tokenizer, write_toy

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


REWARD = "def score(completion):\n    return 0.0\n"
PLAN = (
    "import sys; from coupler.cli import main; sys.exit(main(['plan', 'engine=toy', "
    "'rollout=toy', 'algorithm=toy', 'model.path={0}/toy', 'data.source={0}/rows.jsonl', "
    "'reward.target={0}/reward.py:score', 'run_dir={0}/run', 'steps=1', "
    "'sampling.max_tokens=8', 'data.max_prompt_tokens=64']))"
)


class Place:
    """A folder with a run's inputs, a cache of its own, and a plugin that hangs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_toy(folder / "toy")
        write_tokenizer(folder / "toy")
        (folder / "rows.jsonl").write_text('{"prompt": "1 + 2 = ?", "answer": "3"}\n')
        (folder / "reward.py").write_text(REWARD)

        site = folder / "site"
        record = site / "acme-1.0.dist-info"
        record.mkdir(parents=True)
        (site / "acme_hangs.py").write_text("import time\ntime.sleep(1000)\n")
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (record / "entry_points.txt").write_text("[coupler]\nacme = acme_hangs\n")

    def environment(self, cache: str, beside: bool) -> dict[str, str]:
        path = str(self.folder / "site") if beside else ""
        return os.environ | {"XDG_CACHE_HOME": str(self.folder / cache), "PYTHONPATH": path}


def seconds(code: str, environment: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one interpreter; on a busy machine only the second says
    something.
    """
    start, used = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
    now = os.times()
    cpu = now.children_user + now.children_system - used.children_user - used.children_system
    return time.perf_counter() - start, cpu


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        plan = PLAN.format(folder)
        for label, code, is_cold, beside in (
            ("python -c pass", "pass", False, False),
            ("import numpy", "import numpy", False, False),
            ("import coupler", "import coupler", False, False),
            ("coupler plugins, empty cache", LISTING, True, False),
            ("coupler plugins", LISTING, False, False),
            ("coupler plan, empty cache", plan, True, False),
            ("coupler plan, empty cache, beside one that hangs", plan, True, True),
            ("coupler plan", plan, False, False),
            ("coupler plan, beside one that hangs", plan, False, True),
        ):
            if not is_cold:
                seconds(code, place.environment("warm", beside))
            each = [
                seconds(code, place.environment(f"{label}{i}" if is_cold else "warm", beside))
                for i in range(runs)
            ]
            wall, cpu = (statistics.median(times) for times in zip(*each, strict=True))
            print(f"{label:50} {wall:.3f} s, of CPU {cpu:.3f} s (medians of {runs})")

    shown = subprocess.run(
        [sys.executable, "-c", LISTING + SHOW], check=True, capture_output=True, text=True
    )
    imported = shown.stderr.splitlines()[-1].split()
    print(f"heavy modules    {', '.join(imported) or 'none'}")
    sys.exit(bool(imported))


if __name__ == "__main__":
    main()
