"""What a user's first hour takes: wheels into an empty environment, and a GRPO run from
them; nothing of this checkout.

    python benchmarks/fresh_install.py          # vLLM's CPU build
    python benchmarks/fresh_install.py cuda     # on a machine with a GPU
    python benchmarks/fresh_install.py hf       # rollout=hf, the newest of all

The wheels' own metadata says what is installed. Of this workspace uv reads one thing:
that plain torch serves the CPU build of vLLM (``dependency-metadata``), whose wheel
asks for a build that the public registry has not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("coupler-core", "coupler-engine-fsdp", "coupler-algos")
VLLM = "coupler-rollout-vllm"
REWARD = "def score(completion):\n    return len(set(completion)) / (1 + len(completion))\n"
WRITE = (
    "from pathlib import Path; from coupler.testing.models import write_qwen2 as w; "
    "w(Path('model'), tied=True)"
)
ON_CPU = {
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
STEPS = 2
SHOWN = ("torch", "transformers", "vllm", "vllm-cpu", *PACKAGES, VLLM)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "build",
        choices=("cpu", "cuda", "hf"),
        nargs="?",
        default="cpu",
        help="of vLLM, or rollout=hf",
    )
    parser.add_argument("--wheels", type=Path, help="a folder of wheels; default: build them")
    arguments = parser.parse_args()
    build = arguments.build
    found = ROOT / ".tools" / "bin" / "uv"
    uv = str(found) if found.exists() else shutil.which("uv")
    if uv is None:
        sys.exit("there is no uv: neither .tools/bin/uv (make setup) nor on the PATH")
    with tempfile.TemporaryDirectory(prefix="fresh-install-") as name:
        folder = Path(name)
        environment = {**clean(), **(ON_CPU if build == "cpu" else {})}
        wheels = arguments.wheels.absolute() if arguments.wheels else folder
        rows = []
        if not arguments.wheels:
            built = timed(uv, "build", "--all-packages", "--wheel", "--out-dir", name, "--quiet")
            rows.append(("build the wheels", built))
        rows.append(
            (
                "make the environment",
                timed(uv, "venv", "--quiet", "--python", sys.executable, f"{name}/venv"),
            )
        )
        python = folder / "venv" / "bin" / "python"
        install = [
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            str(python),
            *requirements(wheels, build),
        ]
        at = folder if build == "hf" else ROOT
        rows.append(("install", timed(*install, cwd=at)))
        listing = subprocess.check_output(
            [uv, "pip", "list", "--python", str(python), "--format", "json"], timeout=60
        )
        versions = {each["name"]: each["version"] for each in json.loads(listing)}
        rollout = "hf" if build == "hf" else "vllm"
        rows.append(("GRPO run", train(folder, python, environment, rollout)))
        steps = [
            json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    for what, seconds in rows:
        print(f"{what:22} {seconds:7.1f} s")
    print(
        f"{len(versions)} packages: "
        + ", ".join(f"{n} {v}" for n, v in versions.items() if n in SHOWN)
    )
    start, last = steps[0], steps[-1]
    print(
        f"{len(steps) - 1} steps; probe of the weights {start['sync/probe']:.1e}, permuted "
        f"{start['sync/probe_permuted']:.2f}; train_infer/abs_diff "
        f"{last['train_infer/abs_diff']:.1e}"
    )
    return 0


def clean() -> dict[str, str]:
    """The environment without what would lead back to this checkout."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }


def requirements(folder: Path, build: str) -> list[str]:
    """The wheels by their paths, vLLM's plugin with its extra."""
    found = []
    for package in PACKAGES if build == "hf" else (*PACKAGES, VLLM):
        (wheel,) = folder.glob(f"{package.replace('-', '_')}-*.whl")
        extra = f"[{build}]" if package == VLLM else ""
        found.append(f"{package}{extra} @ {wheel.as_uri()}")
    return found


def train(folder: Path, python: Path, environment: dict[str, str], rollout: str) -> float:
    """The command of a user, in a folder that knows nothing of the checkout."""
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    timed(str(python), "-c", WRITE, cwd=folder, env=environment)
    options = {
        "engine": "fsdp", "engine.max_tokens_per_gpu": 256, "rollout": rollout, "algorithm": "grpo",
        "model.path": "model", "data.source": "rows.jsonl", "data.max_prompt_tokens": 64,
        "reward.target": "reward.py:score", "steps": STEPS, "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "sampling.max_tokens": 8, "run_dir": "run", "strict": "true",
    }  # fmt: skip
    command = [
        str(python.parent / "coupler"),
        "train",
        *(f"{key}={value}" for key, value in options.items()),
    ]
    return timed(*command, cwd=folder, env=environment)


def timed(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> float:
    """Seconds that the command takes; ends everything where it fails."""
    start = time.perf_counter()
    subprocess.run(command, cwd=cwd, env=env or clean(), check=True, timeout=1800)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
