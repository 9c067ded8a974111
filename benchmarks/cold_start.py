"""How long a run takes from the start of its process to its first sampled completion
and its first step, which packages it imports on the way, and how long it takes to
refuse a mistake.

python benchmarks/cold_start.py [--runs N] [--only refusals,start,imports,bound]
    [CONFIG.yaml | quickstart] [key=value ...]

Seconds of the processor are those of all processes of the run: on a machine that others
use, only they can be compared. Phases are told by wrappers around functions of core,
which the measured process imports before it starts.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
HEAVY = ("torch", "transformers", "vllm", "sglang", "megatron", "ray", "reasoning_gym")
MISTAKES = {
    "unknown key": "engine.lrr=1",
    "no such model folder": "model.path=/not/there",
    "no such reward": "reward.target=not_there.py:score",
    "no such file of rows": "data.source=not_there.jsonl",
    "no such engine": "engine=fdsp",
}
REFUSED = (
    "import sys; from coupler.cli import main; code = main(sys.argv[1:]); "
    f"print('HEAVY', *(m for m in {HEAVY} if m in sys.modules)); sys.exit(code)"
)
MARKED = """
import os, sys
said = set()
def mark(name):
    if name not in said:
        said.add(name)
        os.write({fd}, (name + "\\n").encode())
        os.read({back}, 1)
mark("process started")
def around(owner, name, before="", after="", when=lambda *_: True):
    inner = getattr(owner, name)
    if inner.__code__.co_flags & 0x80:
        async def outer(*args, **more):
            before and mark(before)
            result = await inner(*args, **more)
            after and mark(after)
            return result
    else:
        def outer(*args, **more):
            before and mark(before)
            result = inner(*args, **more)
            after and when(*args) and mark(after)
            return result
    setattr(owner, name, outer)
from coupler.jobs import evaluate, train
from coupler.jobs.build import Builder
from coupler.loop.rollout_group import RolloutGroup
from coupler.run.run_folder import Journal
around(Builder, "prompts", before="configuration checked")
for job in (sys.modules["coupler.jobs.evaluate"], sys.modules["coupler.jobs.train"]):
    around(job, "import_classes", before="rows encoded", after="backends imported")
    around(job, "start", before="processes of rewards ready", after="models loaded")
around(RolloutGroup, "resume", after="weights pushed once")
around(RolloutGroup, "generate", after="first completion")
around(Journal, "log", after="first step", when=lambda _, step, *__: step > 0)
"""
JOB = "\nfrom coupler.cli import main\nsys.exit(main(sys.argv[1:]))\n"
SCRIPT = """
import runpy
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
QUICKSTART = "examples/quickstart/quickstart.py"
BOUND = """
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
if sys.argv[1] != "-":
    AutoTokenizer.from_pretrained(sys.argv[1])
    AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
"""


def used(root: int) -> float:
    """Return the seconds of the processor of a process, its ended children and all
    below it.
    """
    parents, seconds = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            rest = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(rest[1])
        seconds[int(folder.name)] = sum(map(int, rest[11:15])) / TICKS

    def below(pid: int) -> bool:
        while pid and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    return sum(spent for pid, spent in seconds.items() if below(pid))


def phases(code: str, arguments: list[str]) -> Iterator[tuple[str, float, float]]:
    """Run ``code``, and yield each phase with its wall seconds and those of the
    processor.
    """
    said, says = os.pipe()
    waits, goes = os.pipe()
    command = [sys.executable, "-c", MARKED.format(fd=says, back=waits) + code, *arguments]
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        pass_fds=(says, waits),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        errors="replace",
    )
    os.close(says)
    os.close(waits)
    with os.fdopen(said) as lines:
        for line in iter(lines.readline, ""):
            yield line.strip(), time.perf_counter() - start, used(process.pid)
            if line.startswith("first step"):
                process.kill()
            os.write(goes, b".")
    os.close(goes)
    _, errors = process.communicate()
    if process.returncode not in (0, -9):
        sys.exit(errors)


def run_of(config: str, overrides: list[str], folder: Path) -> tuple[str, list[str]]:
    """Return the code and the arguments of one start."""
    if config == "quickstart":
        return SCRIPT, [QUICKSTART, "--run-dir", str(folder), "--sft-steps", "1", "steps=1"]
    more = [f"run_dir={folder}", "steps=1", "checkpoint.export=false", *overrides]
    return JOB, ["train", "--config", config, *more]


def show_refusals(config: str, overrides: list[str], runs: int) -> None:
    """Print how long each mistake takes, and what was imported before it."""
    if config == "quickstart":
        config = str(ROOT / "examples" / "quickstart" / "train.yaml")
    for label, mistake in MISTAKES.items():
        each, heavy = [], set()
        for _ in range(runs):
            before, start = os.times(), time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", REFUSED, "train", "--config", config, *overrides, mistake],
                capture_output=True,
                text=True,
                cwd=ROOT,
            )
            if done.returncode != 2:
                sys.exit(f"{mistake} was not refused: {done.stderr[-2000:]}")
            now, wall = os.times(), time.perf_counter() - start
            cpu = now[2] + now[3] - before[2] - before[3]
            each.append((wall, cpu))
            heavy |= {*done.stdout.splitlines()[-1].split()[1:]}
        wall, cpu = (statistics.median(times) for times in zip(*each, strict=True))
        print(f"| {label} | {wall:.2f} s | {cpu:.2f} s | {', '.join(sorted(heavy)) or 'none'} |")


def show_phases(config: str, overrides: list[str], runs: int) -> None:
    """Print when each phase of a start is reached."""
    each: dict[str, list[tuple[float, float]]] = {}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            for name, wall, cpu in phases(*run_of(config, overrides, Path(folder) / "run")):
                print(f"{name} {wall:.2f} s", file=sys.stderr, flush=True)
                each.setdefault(name, []).append((wall, cpu))
    for name, times in each.items():
        wall, cpu = (statistics.median(one) for one in zip(*times, strict=True))
        print(f"| {name} | {wall:.2f} s | {cpu:.2f} s |", flush=True)


def show_imports(config: str, overrides: list[str]) -> None:
    """Print the packages whose own modules take longest to import, up to the first
    completion.
    """
    with tempfile.TemporaryDirectory() as folder:
        code, arguments = run_of(config, overrides, Path(folder) / "run")
        stop = MARKED.replace("os.read({back}, 1)", "name == 'first completion' and os._exit(0)")
        command = [sys.executable, "-X", "importtime", "-c", stop.format(fd=1, back=0) + code]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, cwd=ROOT, errors="replace"
        )
    own: Counter[str] = Counter()
    for micros, name in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", done.stderr, re.M):
        own[name.partition(".")[0]] += int(micros)
    print(f"| all | {own.total() / 1e6:.2f} s |")
    for name, micros in own.most_common(14):
        print(f"| {name} | {micros / 1e6:.2f} s |")


def show_bound(config: str, runs: int) -> None:
    """Print what imports of torch and transformers take, and loading the model."""
    model = "-"
    if config != "quickstart":
        from coupler.data.model_folder import model_folder

        os.chdir((ROOT / config).parent)
        model = model_folder(yaml.safe_load(Path(ROOT / config).read_text())["model"]["path"])
    for label, code, given in (
        ("import torch", "import torch", "-"),
        ("import torch, transformers", "import torch, transformers", "-"),
        ("and its classes of models", "import sys" + BOUND, "-"),
        ("and the model", "import sys" + BOUND, model),
    ):
        each = []
        for _ in range(runs):
            before, start = os.times(), time.perf_counter()
            subprocess.run([sys.executable, "-c", code, given], check=True, capture_output=True)
            now = os.times()
            each.append((time.perf_counter() - start, now[2] + now[3] - before[2] - before[3]))
        wall, cpu = (statistics.median(times) for times in zip(*each, strict=True))
        print(f"| {label} | {wall:.2f} s | {cpu:.2f} s |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="refusals,start,imports,bound")
    parser.add_argument("given", nargs="*", help="recipes, quickstart, and key=value")
    arguments = parser.parse_args()
    overrides = [one for one in arguments.given if "=" in one]
    configs = [one for one in arguments.given if "=" not in one] or ["quickstart"]
    for config in configs:
        for what in arguments.only.split(","):
            print(f"\n{config}: {what}, medians of {arguments.runs}, load {os.getloadavg()[0]:.1f}")
            if what == "refusals":
                show_refusals(config, overrides, arguments.runs)
            elif what == "start":
                show_phases(config, overrides, arguments.runs)
            elif what == "imports":
                show_imports(config, overrides)
            else:
                show_bound(config, arguments.runs)


if __name__ == "__main__":
    main()
