"""Every command of the pages in ``docs/tasks`` runs, in processes of its own.

What it leaves is what the page says.

The commands are those of the page, but for five things. The model and the samples are
small, ports are free ones, a cluster of the run's own has no reference, the kit of a
rollout is a part of it, and a plugin is installed into a folder of the test. What
``make setup`` makes is there, since the tests run in it. ``benchmarks/nine_tasks.py``
changes nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import COST, DOCS, ROOT, TASKS, commands, play

NAMES = ("own-data", "own-reward", "own-algorithm", "own-backend", "second-gpu",
         "second-machine", "resume", "compare", "serve")  # fmt: skip
SMALL = "model.path=models/small engine.max_tokens_per_gpu=256"
SHORT = "sampling.max_tokens=8 prompts_per_step=2"
# A reference on each rank is left to the page of two machines: each is a process more.
ALONE = "algorithm.kl=none"
# What the Makefile asks of every cluster.
OF_RAY = ("RAY_worker_niceness", "RAY_prestart_worker_first_driver")
# What a folder of a checkout has, and commands of a task may name.
SHARED = ("recipes", "examples", "Makefile")


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """A folder that looks like a checkout after ``make setup``, with a small model."""
    for name in SHARED:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small").symlink_to(model)
    return tmp_path


@pytest.fixture
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """A home of its own, short paths for Ray's sockets, and a folder for a plugin.

    What a cluster of another test set for this process is not for these.
    """
    short = tempfile.mkdtemp(prefix="ray-")
    packages = [str(folder / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {k: v for k, v in os.environ.items() if k in OF_RAY or not k.startswith("RAY_")}
    yield {
        **kept,
        "HOME": str(folder / "home"),
        "RAY_TMPDIR": short,
        "PYTHONPATH": os.pathsep.join(packages),
    }
    shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def changed(folder: Path) -> Callable[[str], str]:
    """Return what the test runs in the place of a command."""
    ports = {number: str(free_port()) for number in ("6379", "8000")}

    def change(command: str) -> str:
        for number, free in ports.items():
            command = re.sub(rf"(?<=[:= ]){number}\b", free, command)
        words = shlex.split(command)
        if words[0] == "make":
            return f"make --directory {ROOT} --dry-run {' '.join(words[1:])}"
        if words[0] == ".tools/bin/uv":
            target = f"--no-deps --target {folder / 'plugins'}"
            return f"{uv()} pip install --quiet {target} ./{words[-1]}"
        if ".venv/bin/pytest" in words and "rollout=mine" in words:
            return f"{command} -k 'arrives or malformed or (follow and not long)'"
        if command.startswith("PYTHONPATH=."):
            command = command.replace(
                "PYTHONPATH=.", f"PYTHONPATH=.:{os.environ.get('PYTHONPATH', '')}"
            )
        return f"{command} {_smaller(words)}"

    return change


def _smaller(words: list[str]) -> str:
    if "--config" not in words:
        return ""
    if "doctor" in words:
        return SMALL
    joins = any(word.startswith("ray.address=") for word in words)
    own_cluster = "executor=ray" in words and not joins
    return f"{SMALL} {SHORT} {ALONE}" if own_cluster else f"{SMALL} {SHORT}"


def uv() -> str:
    found = ROOT / ".tools" / "bin" / "uv"
    path = str(found) if found.exists() else shutil.which("uv")
    if path is None:
        pytest.skip("uv is not installed: make setup installs it")
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# --- what is there after a page ---


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]


def starts(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "run.json").read_text())


def samples(run: Path) -> str:
    return "".join(path.read_text() for path in sorted((run / "samples").rglob("*.jsonl")))


def after_own_data(folder: Path, printed: list[str]) -> None:
    assert "4 rows" in printed[2]
    assert steps(folder / "runs" / "mine") == [0, 1, 2, 3]
    assert "capital of" in samples(folder / "runs" / "mine")


def after_own_reward(folder: Path, printed: list[str]) -> None:
    lines = (folder / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines[1:]]
    # The reward of the recipe is never below zero.
    assert len(rewards) == 3 and min(rewards) < 0


def after_own_algorithm(folder: Path, printed: list[str]) -> None:
    assert " passed" in printed[2]
    assert "name: mine" in (folder / "runs" / "mine" / "config.yaml").read_text()
    assert steps(folder / "runs" / "mine") == [0, 1, 2, 3]


def after_own_backend(folder: Path, printed: list[str]) -> None:
    assert " passed" in printed[4]
    assert "(rollout mine)" in printed[5] or "rollout (mine)" in printed[5]
    assert steps(folder / "runs" / "mine") == [0, 1, 2]


def after_second_gpu(folder: Path, printed: list[str]) -> None:
    logs = {path.stem for path in (folder / "runs" / "mine" / "logs").glob("*.log")}
    assert {"policy-0", "policy-1", "rollout-0", "rollout-1"} <= logs
    assert steps(folder / "runs" / "mine") == [0, 1, 2, 3]


def after_second_machine(folder: Path, printed: list[str]) -> None:
    # A node of 4 CPUs has no room for both bundles, of 3 processes each.
    starts = [
        each for each in commands(DOCS / "tasks" / "second-machine.md") if "ray start" in each
    ]
    assert ["--num-cpus=4 " in each for each in starts] == [True, True]
    assert "6 processes, colocated: policy and reference and rollout on 2 bundles" in printed[5]
    assert steps(folder / "runs" / "mine") == [0, 1, 2, 3]


def after_resume(folder: Path, printed: list[str]) -> None:
    run = folder / "runs" / "mine"
    assert re.search(r"^mine .* killed$", printed[3], re.MULTILINE), printed[3]
    assert [start.get("ended") for start in starts(run)] == [None, "done"]
    assert steps(run) == [0, 1, 2, 3, 4, 5, 6]


def after_compare(folder: Path, printed: list[str]) -> None:
    page = (folder / "report.html").read_text()
    assert "runs/slow" in page and "runs/fast" in page and "engine.lr" in page


def after_serve(folder: Path, printed: list[str]) -> None:
    assert "serve it:  transformers serve served\n" in printed[3]
    answer = json.loads(printed[5])
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] > 0


CHECKS: dict[str, Callable[[Path, list[str]], None]] = {
    name: globals()[f"after_{name.replace('-', '_')}"] for name in NAMES
}


# what test_ray, test_resume and test_report try as well
SLOW = dict.fromkeys(("second-gpu", "second-machine", "resume", "compare"), pytest.mark.slow)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=SLOW.get(page.stem, ())) for page in TASKS]
)
def test_every_command_runs(
    page: Path, folder: Path, environment: dict[str, str], changed: Callable[[str], str]
) -> None:
    ran = list(play(page, folder, environment, changed))
    assert [each.command for each in ran] == commands(page)
    CHECKS[page.stem](folder, [each.printed for each in ran])


# --- what the pages say of themselves ---


def test_there_are_nine() -> None:
    assert sorted(page.stem for page in TASKS) == sorted(NAMES)
    listed = re.findall(r"\]\(tasks/([\w-]+)\.md\)", (DOCS / "index.md").read_text())
    assert listed == [*NAMES]


@pytest.mark.parametrize("page", TASKS, ids=[page.stem for page in TASKS])
def test_the_first_line_is_what_was_measured(page: Path) -> None:
    title, line = page.read_text().split("\n\n")[:2]
    cost = COST.fullmatch(line)
    assert title.startswith("# ") and cost, line
    assert int(cost[1]) == len(commands(page)) <= 6

    table = (DOCS / "measurements.md").read_text()
    row = re.search(
        rf"^\| \[.*\]\(tasks/{page.name}\) \| (\d+) \| ([\d.]+) \|", table, re.MULTILINE
    )
    assert row, f"python benchmarks/nine_tasks.py {page.stem}"
    assert (int(row[1]), math.ceil(float(row[2]))) == (int(cost[1]), int(cost[2]))


def test_a_command_that_fails_ends_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '```text title="a.txt"\nb\n```\n\n```\ncat a.txt\ncat none.txt\ncat a.txt\n```\n'
    )
    ran = []
    with pytest.raises(AssertionError, match=r"page.md:5: cat none.txt\ncat: none.txt"):
        ran += play(page, tmp_path, os.environ)
    assert (tmp_path / "a.txt").read_text() == "b\n"


def test_a_server_ends_with_its_page(tmp_path: Path) -> None:
    page, said = tmp_path / "page.md", "<!-- goes on; ready when it says: up -->"
    server = "bash -c 'echo $$ up; sleep 600; true'"
    page.write_text(f"{said}\n```\n{server}\n```\n\n```\necho asked\n```\n")
    ran = list(play(page, tmp_path, os.environ))
    assert [each.printed.split()[-1] for each in ran] == ["up", "asked"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(ran[0].printed.split()[0]), 0)
