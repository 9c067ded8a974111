"""``coupler doctor`` with a configuration: tokenizer, chat template, data and reward,
each broken for real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coupler.cli import main
from coupler.testing.models import write_qwen2

GOOD = "def score(completion, answer):\n    return float(completion == answer)\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in whole.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def findings(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Write rows and a reward, run doctor on them; return its findings by name."""

    def run(
        *overrides: str,
        rows: str = '{"prompt": "1 + 1 ?", "answer": "2"}\n' * 3,
        reward: str = GOOD,
    ) -> dict:
        (tmp_path / "rows.jsonl").write_text(rows)
        (tmp_path / "reward.py").write_text(reward)
        code = main(
            ["doctor", "--json", f"model.path={model}", f"data.source={tmp_path}/rows.jsonl",
            f"run_dir={tmp_path}/r",
             f"reward.target={tmp_path}/reward.py:score", *overrides]
        )  # fmt: skip
        found = json.loads(capsys.readouterr().out)
        assert code == any(f["verdict"] == "problem" for f in found)
        return {f["name"]: f for f in found}

    return run


def test_all_is_well(findings) -> None:
    found = findings()
    names = (
        "model",
        "weights",
        "tokenizer",
        "chat template",
        "data",
        "reward",
        "torch",
        "transformers",
    )
    assert {name: found[name]["verdict"] for name in names} == dict.fromkeys(names, "ok"), found
    assert (
        "gives [1.0, 1.0] for the answers of 2 rows, [0.0, 0.0] for nothing"
        in found["reward"]["text"]
    )


def expect(finding: dict, text: str, fix: str) -> None:
    assert finding["verdict"] == "problem"
    assert text in finding["text"]
    assert fix in finding["fix"]


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'])
def test_a_broken_tokenizer(findings, model: Path, content: str) -> None:
    (model / "tokenizer.json").write_text(content)
    expect(findings()["tokenizer"], "cannot be loaded", "copy tokenizer.json")


def test_no_tokenizer(findings, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    expect(findings()["tokenizer"], "holds no tokenizer", "copying tokenizer.json into it")


@pytest.mark.parametrize("template", ["{% for", "{{ raise_exception('never') }}"])
def test_a_template_that_does_not_render(findings, model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    expect(findings()["tokenizer"], "chat template", "")


def test_a_template_that_rewrites_turns_is_a_warning(findings, model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text("{{ messages | length }}" + path.read_text())
    found = findings()["chat template"]
    assert found["verdict"] == "warning"
    assert "rewrites earlier turns" in found["text"]


@pytest.mark.parametrize(("kind", "differs"), [("qwen2", True), ("opt", False)])
def test_a_tokenizer_that_transformers_reads_otherwise_is_a_warning(
    findings, model: Path, kind: str, differs: bool
) -> None:
    """It takes the rules of Qwen2's tokenizer for a model of that type."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    found = findings()
    assert ("tokenizer.json" in found) == differs
    if differs:
        assert found["tokenizer.json"]["verdict"] == "warning"
        assert "otherwise than this file says" in found["tokenizer.json"]["text"]


def test_no_data_and_bad_data(findings, tmp_path: Path) -> None:
    expect(findings(rows="")["data"], "rows.jsonl", "")
    expect(
        findings(rows='{"question": "1 + 1 ?", "answer": "2"}\n')["data"], "prompt", "prompt_key"
    )
    expect(
        findings("data.max_prompt_tokens=2")["data"],
        "longer than data.max_prompt_tokens=2",
        "max_prompt_tokens=",
    )
    expect(findings(f"eval.data.source={tmp_path}/no.jsonl")["eval.data"], "no.jsonl", "")


def test_a_reward_that_fails(findings) -> None:
    expect(findings(reward="import nothing_of_this_name")["reward"], "nothing_of_this_name", "")
    expect(
        findings(reward="def score(completion):\n    return 1 / 0\n")["reward"],
        "division by zero",
        "finite number",
    )
    hangs = "import time\ndef score(completion):\n    time.sleep(99)\n"
    expect(
        findings("reward.timeout_s=0.2", reward=hangs)["reward"],
        "took longer than 0.2 s",
        "finite number",
    )


def test_remote_code_is_pointed_out(findings, capsys: pytest.CaptureFixture[str]) -> None:
    findings()
    assert main(["doctor", "model.trust_remote_code=true"]) == 0
    assert "Python files of the model's folder run with your rights" in capsys.readouterr().out


def test_a_kernel_of_another_torch(tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").write_text(
        "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')"
    )
    info = tmp_path / "flash_attn-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from coupler.cli import main; "
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert (
        "problem  flash-attn     is installed but cannot be imported: ImportError: undefined symbol"
        in done.stdout
    )
    assert "pip install --force-reinstall --no-build-isolation --no-deps flash-attn" in done.stdout


def test_rows_of_supervised_training_may_be_conversations(findings) -> None:
    said = '[{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]'
    rows = f'{{"messages": {said}}}\n' * 2
    found = findings("algorithm=sft", rows=rows)
    assert found["data"]["verdict"] == "ok" and "2 rows of " in found["data"]["text"]
    assert findings(rows=rows)["data"]["verdict"] == "problem", "training samples from prompts"
