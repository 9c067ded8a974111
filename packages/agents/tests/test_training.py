"""Whole runs of agents that know the official clients alone, on the toy backends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from coupler.cli import main
from coupler.testing.models import EOS, read_tensors, rewrite, write_tokenizer, write_toy

OPTIONS = (
    "engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy", "trackers=[jsonl]",
    "environment.max_turns=2",
    "data.max_prompt_tokens=64", "sampling.max_tokens=48", "prompts_per_step=2",
    "samples_per_prompt=2", "steps=2", "record.every_steps=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model that mostly ends its turn, and rows."""
    folder = tmp_path_factory.mktemp("inputs")
    write_toy(folder / "toy")
    write_tokenizer(folder / "toy")
    tensors = read_tensors(folder / "toy")
    tensors["head.bias"][EOS] += 6
    rewrite(folder / "toy", folder / "toy", tensors)
    rows = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("client", "workers"),
    [
        ("with_openai", 0),
        ("with_anthropic", 0),
        ("with_openai", 2),
        pytest.param("with_anthropic", 2, marks=pytest.mark.slow),
    ],
)
def test_the_official_clients_are_trained(
    inputs: Path, tmp_path: Path, client: str, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With workers, the gateway is in their processes and the conversation is not."""
    given = [
        "train", *OPTIONS, f"model.path={inputs / 'toy'}", f"run_dir={tmp_path / 'run'}",
        f"data.source={inputs / 'rows.jsonl'}", f"environment.target=played_clients:{client}",
        "environment=program", "environment.uses_tools=false",
        f"environment.workers={workers}",
    ]  # fmt: skip
    assert main(given) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert 1 < line["conversation/turns"] <= 2 and line["environment/failed"] == 0
        assert line["conversation/rows"] == 1, "the second turn extends the first"
        assert line["sampled/reward"] > 0 and line["batch/trajectories"] == 4

    capsys.readouterr()
    assert main(["show", str(tmp_path / "run"), "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("[sampled ") > said.count("--- group ") == 4
    assert "[observation] go" in said


def test_a_run_offers_the_tools_of_a_server(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mcp")
    server = Path(__file__).with_name("played_mcp.py")
    mcp = f"{{played: {{command: [{sys.executable}, {server}], tools: [plus], session: run}}}}"
    given = [
        "train", *OPTIONS, f"model.path={inputs / 'toy'}", f"run_dir={tmp_path / 'run'}",
        f"data.source={inputs / 'rows.jsonl'}", "environment=tools", f"environment.mcp={mcp}",
        "environment.calls=text", "environment.max_tokens=2000", "engine.max_tokens_per_gpu=4096",
        "reward.target=played_tools:length",
    ]  # fmt: skip
    assert main(given) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["environment/failed"] == 0 for line in lines[1:])
    assert "environment.mcp.played has plus, sha256=" in (tmp_path / "run/coupler.log").read_text()
