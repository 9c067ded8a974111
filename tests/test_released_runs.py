"""A run folder outlives a release: those that earlier ones made resume, export and
replay.

``tests/released/COMMIT/NAME`` is what that commit left after ``coupler train --config
train.yaml run_dir=run`` in this folder, and ``expected.jsonl`` are numbers of its own
longer run. A folder joins them whenever a format changes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from job_run import metrics, replayed
from safetensors.numpy import load_file

from coupler.cli import main

RELEASED = sorted(Path(__file__).parent.glob("released/*/*"))


@pytest.fixture(params=RELEASED, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def released(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy, which is the current folder: its paths are relative."""
    shutil.copytree(request.param, tmp_path / "released")
    monkeypatch.chdir(tmp_path / "released")
    return tmp_path / "released"


def test_there_is_one_with_optimizer_state_and_one_with_groups_that_wait() -> None:
    names = {file.name for folder in RELEASED for file in folder.glob("run/checkpoints/step_2/*")}
    assert {"policy", "state.json", "MANIFEST.json", "groups"} <= names


def test_it_goes_on_with_the_numbers_of_its_own_release(
    released: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", "train.yaml", "run_dir=run", "steps=4"]) == 0
    said = capsys.readouterr().out
    assert "going on from run/checkpoints/step_2" in said and "another configuration" not in said
    found = {line["step"]: line for line in metrics(released / "run")}
    assert list(found) == [0, 1, 2, 3, 4]
    for line in (released / "expected.jsonl").read_text().splitlines():
        expected = json.loads(line)
        ours = {name: found[expected["step"]][name] for name in expected}
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_it_is_exported(released: Path) -> None:
    assert main(["export", "run", "--out", "out"]) == 0
    exported, before = (
        load_file(released / folder / "model.safetensors") for folder in ("out", "model")
    )
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        n: t.shape for n, t in before.items()
    }
    assert any((exported[name] != before[name]).any() for name in before)
    if json.loads((released / "model" / "config.json").read_text())["model_type"] != "toy_bigram":
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM.from_pretrained(released / "out").num_parameters() > 0


@pytest.mark.parametrize("stage", ["advantages", "logprobs", "train"])
def test_its_record_is_replayed(
    released: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = (
        metrics(Path("run"))[2]["staleness/max"] > 0
    )  # sampled with older weights, whose log-probs it has
    again = replayed(Path("run"), 1 if stale and stage == "logprobs" else 2, stage, capsys)
    assert len(again) >= 3
    for name, (then, now, _) in again.items():
        assert now == pytest.approx(then, rel=1e-4, abs=1e-4), name
