"""Every kind of plugin as a third party publishes it: seven wheels that know core, and
no core that knows them.
"""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import tokenize
from pathlib import Path

import pytest

from coupler.testing.models import write_qwen2

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LIMITS = {  # lines of code, by folder: without blank lines, comments and docstrings
    "plugin-algorithm": 60,
    "plugin-engine": 180,
    "plugin-minimal": 80,
    "plugin-reward": 60,
    "plugin-sharding": 60,
    "plugin-tracker": 60,
    "plugin-transport": 60,
}
REWARD = "coupler_reward_arithmetic"
CHOSEN = (
    "algorithm=reinforce",
    "engine=plain",
    f"reward={REWARD}:score",
    "rollout=minimal",
    "sharding=plain",
    "tracker=sqlite",
    "transport=shm",
)


def call(*command: object, cwd: Path, timeout_s: float = 1200) -> str:
    """Run a command away from the sources, and return what it printed."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COUPLER_PLUGINS")
    }
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def code_lines(path: Path) -> int:
    """Lines of a module that hold code."""
    text = path.read_text()
    nothing = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            lines |= set(range(token.start[0], token.end[0] + 1))

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and ast.get_docstring(node)
            ):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def test_every_kind_has_an_example() -> None:
    assert {path.name for path in EXAMPLES.glob("plugin-*")} == LIMITS.keys()


@pytest.mark.parametrize("folder", LIMITS)
def test_an_example_is_short(folder: str) -> None:
    """What announces a backend, ``plugin.py``, is not counted: it is the same for
    all.
    """
    counted = {
        path: code_lines(path)
        for path in (EXAMPLES / folder / "src").rglob("*.py")
        if path.name != "plugin.py"
    }
    assert 0 < sum(counted.values()) <= LIMITS[folder], counted


def test_code_is_counted_without_comments_and_docstrings(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Doc.\n\nMore.\n"""\n\n# no\nx = """a\nb"""\n\ndef f():\n    """Doc."""\n    '
        "return 1  # yes\n"
    )
    assert code_lines(module) == 4


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with wheels of core and of every example, built
    from copies.

    Heavy dependencies are those of the interpreter that runs the tests; its editable
    packages are not among them.
    """
    uv = next(
        (
            path
            for path in (ROOT / ".tools/bin/uv", shutil.which("uv"))
            if path and Path(path).exists()
        ),
        None,
    )
    if uv is None:
        pytest.skip("uv is not installed: make setup installs it")
    folder = tmp_path_factory.mktemp("examples")
    wheels, environment = folder / "wheels", folder / "environment"

    sources = [ROOT / "packages" / "core", *(EXAMPLES / name for name in LIMITS)]
    for source in sources:
        call(uv, "build", "--quiet", "--wheel", source, "--out-dir", wheels, cwd=folder)
    call(uv, "venv", "--quiet", "--python", sys.executable, environment, cwd=folder)
    interpreter = environment / "bin" / "python"
    found = sorted(wheels.glob("*.whl"))
    assert len(found) == len(sources)
    call(uv, "pip", "install", "--quiet", "--no-deps", "--python", interpreter, *found, cwd=folder)

    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


def test_they_come_from_wheels(python: Path, tmp_path: Path) -> None:
    code = "import coupler, coupler_engine_plain as e; print(coupler.__file__, e.__file__)"
    assert all("site-packages" in path for path in call(python, "-c", code, cwd=tmp_path).split())


@pytest.mark.parametrize(
    "what", ["not long and not large", pytest.param("long or large", marks=pytest.mark.slow)]
)
def test_they_conform(python: Path, tmp_path: Path, what: str) -> None:
    """All at once: the engine and the rollout are checked as a pair too."""
    chosen = [f"--coupler={one}" for one in CHOSEN]
    kit = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--pyargs",
        "coupler.testing.conformance",
        "-k",
        what,
    )
    printed = call(python, *kit, *chosen, cwd=tmp_path)
    assert " passed" in printed or "[100%]" in printed


def test_a_run_of_nothing_but_examples(python: Path, tmp_path: Path) -> None:
    """No backend of this repository takes part, and the numbers are in the tracker's
    database.
    """
    model = write_qwen2(tmp_path / "model", tied=True)
    run_dir = tmp_path / "run"
    options = (
        f"model.path={model}",
        f"run_dir={run_dir}",
        f"data.source={REWARD}:problems",
        "data.args={size: 8}",
        f"reward.target={REWARD}:score",
        "engine=plain",
        "engine.lr=1e-3",
        "rollout=minimal",
        "algorithm=reinforce",
        "sync.manager=plain",
        "sync.transport=shm",
        "trackers=[jsonl,sqlite]",
        "sampling.max_tokens=8",
        "prompts_per_step=2",
        "samples_per_prompt=4",
        "steps=3",
    )
    call(python, "-m", "coupler.cli", "train", *options, cwd=tmp_path)
    logged = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [0, 1, 2, 3], "the proof and three steps"
    found = {line["step"]: line["train_infer/abs_diff"] for line in logged[1:]}
    assert all(difference < 1e-4 for difference in found.values()), (
        "the rollout runs the engine's weights"
    )
    database = sqlite3.connect(run_dir / "metrics.sqlite")
    rows = dict(
        database.execute("SELECT step, value FROM metrics WHERE name = 'train_infer/abs_diff'")
    )
    database.close()
    assert rows == found
