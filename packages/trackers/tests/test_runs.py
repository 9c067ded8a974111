"""Whole runs on the toy backends, with every library: what each is given, and that a
killed run goes on with its curve.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stores

from coupler.testing.models import write_tokenizer, write_toy

HERE = Path(__file__).parent
TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio", "swanlab")
OPTIONS = (
    "engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy", "steps=7",
    "data.max_prompt_tokens=64", "sampling.max_tokens=8", "prompts_per_step=2",
    "samples_per_prompt=2", "samples.every_steps=2", "checkpoint.every_steps=2",
    "checkpoint.export=false", "deterministic=true", f"trackers=[jsonl,{','.join(TRACKERS)}]",
    "tracker.wandb.mode=offline", "tracker.swanlab.mode=offline", "tracker.wandb.tags=[toy]",
)  # fmt: skip


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_tokenizer(write_toy(folder / "toy"))
    rows = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def score(completion):\n    return len(completion) / 10\n")
    return folder


def train(
    inputs: Path, run_dir: Path, *more: str, plugins: str = "", by: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the toy job, which with ``by`` waits after each step for these trackers."""
    command = [
        sys.executable, "-m", "coupler.cli", "train", *OPTIONS, f"run_dir={run_dir}",
        f"model.path={inputs / 'toy'}", f"data.source={inputs / 'rows.jsonl'}",
        f"reward.target={inputs / 'reward.py'}:score", *more,
    ]  # fmt: skip
    environment = {**os.environ, "PACED": str(run_dir), "PACED_BY": by}
    environment["COUPLER_PLUGINS"] = plugins or ("paced" if by else "")
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=environment, check=False
    )


def logged(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def resumed(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory, mlflow_server: str
) -> tuple[Path, str]:
    """A run that was killed after step 5, whose last checkpoint is of step 4."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    server = (f"tracker.mlflow.uri={mlflow_server}", "tracker.mlflow.experiment=resumed")
    first = train(inputs, run_dir, *server, plugins="killed")
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert [line["step"] for line in logged(run_dir)] == [0, 1, 2, 3, 4, 5]

    again = train(inputs, run_dir, *server, by=",".join(TRACKERS))
    assert again.returncode == 0, again.stderr
    assert "going on from" in again.stdout and "tracker" not in again.stderr, again.stderr
    return run_dir, mlflow_server


@pytest.fixture
def stored(request: pytest.FixtureRequest, resumed: tuple[Path, str]) -> stores.Stored:
    run_dir, server = resumed
    if request.param == "mlflow":
        return stores.of_mlflow(server, "resumed")
    return getattr(stores, f"of_{request.param}")(run_dir)


@pytest.mark.parametrize("stored", TRACKERS, indirect=True)
def test_a_curve_goes_on_after_a_kill(stored: stores.Stored, resumed: tuple[Path, str]) -> None:
    """Each step is there as the run logged it, whatever was logged before the kill."""
    lines = logged(resumed[0])
    assert [line["step"] for line in lines] == list(range(8))
    for name in ("reward/mean", "loss"):
        wanted = {line["step"]: line[name] for line in lines if name in line}
        found = stored.numbers[name]
        assert dict(found) == pytest.approx(wanted, rel=1e-6)
        assert set(found) == set(dict(found).items()), "no step has two values"
    assert len(stored.ids) <= 1, "both starts are one run there"


@pytest.mark.parametrize("stored", ["wandb", "trackio", "swanlab", "tensorboard"], indirect=True)
def test_what_lies_in_files_has_each_step_once(stored: stores.Stored) -> None:
    steps = [step for step, _ in stored.numbers["reward/mean"]]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("stored", TRACKERS, indirect=True)
def test_it_gets_configuration_samples_picture_and_end(stored: stores.Stored) -> None:
    assert "rows.jsonl" in str(stored.config) and "samples_per_prompt" in str(stored.config)
    picture = "reward.png" if "reward.png" in stored.shown else "reward"
    assert {"samples", picture} <= stored.shown
    assert stored.ended in ("done", "done 0", "FINISHED done", "1")


def test_the_run_folder_names_the_run_in_each_library(resumed: tuple[Path, str]) -> None:
    run_dir, _ = resumed
    (run,) = {start["run"] for start in json.loads((run_dir / "run.json").read_text())}
    assert stores.of_wandb(run_dir).ids == stores.of_swanlab(run_dir).ids == {run}


def test_a_run_goes_on_where_no_server_answers(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is logged in, and nothing listens on the port."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    ended = train(
        inputs, tmp_path / "run", "trackers=[jsonl,wandb,mlflow,swanlab]",
        "tracker.wandb.mode=online", "tracker.swanlab.mode=online",
        "tracker.mlflow.uri=http://127.0.0.1:9",
    )  # fmt: skip
    assert ended.returncode == 0 and len(logged(tmp_path / "run")) == 8, ended.stderr
    for name in ("wandb", "mlflow", "swanlab"):
        assert ended.stderr.count(f"tracker {name} failed, and the run goes on: {name}: ") == 1
        assert ended.stderr.count(f"warning: tracker {name} lost ") == 1


def test_a_tracker_that_comes_later_gets_the_steps_before(inputs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert train(inputs, run_dir, "steps=2", "trackers=[jsonl]").returncode == 0
    later = ("trackers=[jsonl,trackio,tensorboard]",)
    ended = train(inputs, run_dir, "steps=4", *later, by="trackio,tensorboard")
    assert ended.returncode == 0, ended.stderr
    for read in (stores.of_trackio, stores.of_tensorboard):
        assert [step for step, _ in read(run_dir).numbers["run/steps"]] == [0, 1, 2, 3, 4]


def test_a_run_that_fails_says_so(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "def score(completion, answer):\n    raise KeyError('no such thing')\n"
    )
    ended = train(
        inputs, tmp_path / "run", f"reward.target={tmp_path / 'bad.py'}:score",
        "trackers=[jsonl,wandb,mlflow,swanlab,trackio]", by="wandb,mlflow,swanlab,trackio",
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    first = ended.stderr.rpartition("coupler: ")[2].partition("\n")[0]
    assert "gave no valid number" in first
    assert stores.of_wandb(tmp_path / "run").ended == f"{first} 1"
    assert stores.of_swanlab(tmp_path / "run").ended == f"2 {first}"
    assert stores.of_trackio(tmp_path / "run").ended == first
    uri = f"sqlite:///{tmp_path / 'run' / 'mlflow' / 'mlflow.db'}"
    assert stores.of_mlflow(uri).ended == f"FAILED {first}"
