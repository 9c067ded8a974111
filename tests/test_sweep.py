"""``--multirun`` runs the combinations of swept values on the toy backends, and refuses
a sweep with a wrong one before the first run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_run import metrics, toy_train

from coupler.cli import main
from coupler.cli.sweep.one_run import name_of
from coupler.cli.sweep.space import read_space

RAISES = "def score(completion):\n    raise ValueError('no')\n"
SCORES = "def score(completion):\n    return len(set(completion)) / (1 + len(completion))\n"
SLOW = "import time\ndef score(completion):\n    time.sleep(60)\n    return 0.0\n"


def arguments(folder: Path, *more: str) -> list[str]:
    given = toy_train(folder, "steps=1", *more)
    return [text for text in given if not text.startswith("engine.lr=") and text != "steps=3"]


def results(folder: Path) -> list[dict]:
    return json.loads((folder / "run" / "sweep.json").read_text())


def test_a_sweep_runs_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_text(RAISES)
    good.write_text(SCORES)
    rewards = f"reward.target={bad}:score,{good}:score"
    command = [
        text
        for text in arguments(tmp_path, "--multirun", rewards)
        if not text.startswith("reward.target=") or text == rewards
    ]

    # The run that fails comes first, and does not end the other.
    assert main(command) == 1
    rows = results(tmp_path)
    values = [row["values"]["reward.target"] for row in rows]
    assert values == [f"{file}:score" for file in (bad, good)]
    assert [row["ended"] == "done" for row in rows] == [False, True]

    out = capfd.readouterr()
    lines = out.out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("reward.target "))
    words = ["reward.target", "first", "reward", "last", "reward", "ended", "folder"]
    assert lines[head].split() == words
    # run.json of each run has the reason.
    reasons = [
        json.loads((Path(row["folder"]) / "run.json").read_text())[-1]["ended"] for row in rows
    ]
    assert rows[0]["ended"] == f"failed: {reasons[0]}"
    assert "gave no valid number" in reasons[0]
    assert f" failed: {reasons[0][:60]}" in lines[head + 1] and " done " in lines[head + 2]
    assert f"{name_of([f'reward.target={bad}:score'])} failed" in out.out + out.err

    for row in rows[1:]:
        lines = metrics(Path(row["folder"]))
        numbers = [line["reward/mean"] for line in lines if "reward/mean" in line]
        assert (row["first"], row["last"]) == (numbers[0], numbers[-1])
    assert "good.py" in (tmp_path / "run" / "sweep.html").read_text()

    # The same command makes the run that failed, and leaves the other alone.
    done = {row["folder"]: touched(Path(row["folder"])) for row in rows[1:]}
    bad.write_text(SCORES)
    assert main(command) == 0
    assert [row["ended"] for row in results(tmp_path)] == ["done"] * 2
    assert {folder: touched(Path(folder)) for folder in done} == done
    assert capfd.readouterr().out.count("is done already") == 1

    # Nothing is left to do.
    assert main(command) == 0
    assert capfd.readouterr().out.count("is done already") == 2
    assert {folder: touched(Path(folder)) for folder in done} == done


def touched(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["seed=1,x"], "seed takes an integer, got 'x'."),
        (["sede=1,2"], "unknown option sede."),
        (["seed=1,2", "steps=x"], "steps takes an integer"),
        (["seed=1,2", "sampling.temperature=1,-1"], "sampling.temperature"),
        (["engine=toy,nope"], "engine is given twice."),
        (["engine.layers=1,2"], "unknown option engine.layers."),
        (["eval.rollout=toy,nope"], "nope"),
        (["engine@critic.engine=toy,nope"], "nope"),
        (["seed=1,1"], "two runs of the sweep are seed-1."),
        (["seed=1"], "--multirun needs an option with several values."),
        (["run_dir=a,b"], "run_dir takes one folder"),
        (["seed=1,2", "seed=3"], "seed is given twice."),
        (["seed=range(1,100000)"], "the values of seed make more than 1000 runs."),
        (["seed=range(1,1)"], "seed=range(1,1) has no value."),
        (["seed=glob(*)"], "seed=glob(*) names no values."),
        (["engine.lr=interval(0.1,0.2)"], "engine.lr=interval(0.1,0.2) is an interval"),
        (["seed=1,2", "hydra/launcher=nope"], "Hydra refuses hydra/launcher=nope"),
        (["seed=1,2", "hydra.launcher.nope=1"], "Hydra refuses hydra.launcher.nope=1"),
        (["seed=1,2", "hydra.job.chdir=true"], "hydra.job.chdir=true is no option of a sweep."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_sweep_is_refused_before_a_run(
    given: list[str], sentence: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--multirun", *given]) == 2
    said = capsys.readouterr().err
    assert said.startswith("coupler: ") and sentence in said.splitlines()[0]
    assert len(said.splitlines()) > 1
    run_dir = next(text for text in command if text.startswith("run_dir="))
    assert not Path(run_dir.partition("=")[2]).exists()


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    given = [text for text in command if not text.startswith("run_dir=")]
    assert main([*given, "--multirun", "seed=1,2", f"run_dir={tmp_path / 'file'}"]) == 2
    assert f"{tmp_path / 'file'}" in capsys.readouterr().err.splitlines()[0]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return arguments(tmp_path_factory.mktemp("inputs"))


def test_names_are_safe_and_tell_runs_apart() -> None:
    assert name_of(["engine.lr=1e-06", "seed=1"]) == "engine.lr-1e-06_seed-1"
    assert name_of(["engine.name=toy"]) == "engine-toy"
    names = {name_of([f"model.path={path}"]) for path in ("a/b", "a-b", "'a b'", "../a")}
    assert len(names) == 4 and not any(set(name) & set("/' =") for name in names)
    assert name_of(["model.path=models/small"]).startswith("model.path-small-")
    assert len(name_of([f"model.path={'x' * 500}"])) < 200


def test_a_search_is_checked_at_the_values_it_may_take() -> None:
    space = read_space(["engine.lr=interval(0.1,0.2)", "seed=1,2", "hydra/sweeper=optuna"])
    assert space.searched
    assert space.combinations() == [
        ["engine.lr=0.1", "seed=1"],
        ["engine.lr=0.2", "seed=1"],
        ["engine.lr=0.1", "seed=2"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "given", "runs"),
    [
        (
            "hydra_plugins.hydra_joblib_launcher",
            ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2"],
            2,
        ),
        (
            "hydra_plugins.hydra_optuna_sweeper",
            ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1",
             "sampling.temperature=interval(0.5, 1)"],
            3,
        ),
    ],
    ids=["joblib", "optuna"],
)  # fmt: skip
def test_a_plugin_of_hydra_leads_a_sweep(
    package: str, given: list[str], runs: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(package)
    assert main(arguments(tmp_path, "--multirun", *given)) == 0
    rows = results(tmp_path)
    assert [row["ended"] for row in rows] == ["done"] * runs
    swept = {value for row in rows for value in row["values"].values()}
    assert len(swept) == runs
    for row in rows:
        assert row["last"] == metrics(Path(row["folder"]))[-1]["reward/mean"]
    assert capfd.readouterr().out.splitlines()[-1].endswith("sweep.html")


def test_ctrl_c_ends_a_product_and_the_table_comes(tmp_path: Path) -> None:
    reward = tmp_path / "slow.py"
    reward.write_text(SLOW)
    rewards = f"reward.target={tmp_path / 'reward.py'}:score,{reward}:score"
    command = arguments(tmp_path, "--multirun", rewards, "seed=1,2")
    command = [text for text in command if not text.startswith("reward.target=") or text == rewards]
    run = tmp_path / "run"
    waits, never = (name_of([f"reward.target={reward}:score", f"seed={n}"]) for n in (1, 2))
    process = subprocess.Popen(
        [sys.executable, "-m", "coupler", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 200
        while not (run / waits / "coupler.log").is_file():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        out, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "coupler: interrupted"
    assert not (run / never).exists()

    rows, good = results(tmp_path), f"{tmp_path / 'reward.py'}:score"
    values = [(row["values"]["reward.target"], row["values"]["seed"]) for row in rows]
    assert values == [(good, 1), (good, 2), (f"{reward}:score", 1)]
    words = ["reward.target", "seed", "first", "reward", "last", "reward", "ended", "folder"]
    assert words in [line.split() for line in out.splitlines()]
    assert [row["ended"] for row in rows] == ["done", "done", "interrupted"]
    assert [" done " in line for line in out.splitlines()[-4:-1]] == [True, True, False]
    assert f" interrupted  {run / waits}" in out.splitlines()[-2]
    assert out.splitlines()[-1] == str(run / "sweep.html")
