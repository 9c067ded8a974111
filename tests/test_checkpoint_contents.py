"""The parts of a checkpoint: what is written, what is read, the model beside it, and
the user's function that is called with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from job_run import arguments, metrics, run, write_inputs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coupler.cli import main
from coupler.run.checkpoint import check

HOOKS = """
from pathlib import Path

def note(folder):
    whole = (Path(folder) / "MANIFEST.json").is_file()
    with open(Path(folder).parent.parent / "hooked.txt", "a") as file:
        file.write(f"{Path(folder).name} {whole}\\n")

def fails(folder):
    raise RuntimeError("the bucket is full")

def hangs(folder):
    import time
    time.sleep(3600)

number = 3
"""


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step}"


def test_a_hugging_face_folder_is_beside_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """It is the model of that step, as the export of a run that ends there is."""
    more = ("checkpoint.every_steps=1", "checkpoint.contents=[model,optimizer,extra,hf_model]")
    folder = run("sft", model, tmp_path / "run", *more, "checkpoint.keep_last=0", "steps=2")
    ended = run("sft", model, tmp_path / "one" / "run", "steps=1")
    for step, other in ((1, ended / "export"), (2, folder / "export")):
        beside = step_folder(folder, step) / "hf_model"
        assert check(step_folder(folder, step)) == "", "the manifest knows its files"
        got, want = (load_file(path / "model.safetensors") for path in (beside, other))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
        AutoModelForCausalLM.from_pretrained(beside)


def test_what_is_not_read_starts_anew(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("sft", model, tmp_path / "run", "steps=1")
    for steps, contents, said in (
        (2, "[model,extra]", "step_1 is read without its optimizer"),
        (3, "[model,optimizer]", "step_2 is read without extra"),
    ):
        capsys.readouterr()
        more = (f"checkpoint.load_contents={contents}", f"steps={steps}")
        folder = run("sft", model, tmp_path / "run", *more)
        assert said in capsys.readouterr().out
        assert [line["step"] for line in metrics(folder)][-1] == steps


def test_what_is_not_written_is_not_there(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run("train", model, tmp_path / "run", "steps=1", "checkpoint.contents=[model]")
    manifest = json.loads((step_folder(folder, 1) / "MANIFEST.json").read_text())
    assert manifest["parts"] == ["params"] and manifest["extra"] is False
    run("train", model, tmp_path / "run", "steps=2", "checkpoint.contents=[model]")
    assert "is read without extra" in capsys.readouterr().out


def test_a_hook_is_called_with_each_whole_checkpoint(model: Path, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    more = ("checkpoint.every_steps=1", f"checkpoint.hook={tmp_path / 'hooks.py'}:note")
    folder = run("sft", model, tmp_path / "run", *more, "steps=2")
    assert (folder / "hooked.txt").read_text() == "step_1 True\nstep_2 True\n"


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("fails", (), "RuntimeError: the bucket is full"),
        ("hangs", ("checkpoint.deadline_s=4",), "has not returned after"),
    ],
)
def test_a_hook_never_ends_a_run(
    name: str,
    more: tuple[str, ...],
    said: str,
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    hook = f"checkpoint.hook={tmp_path / 'hooks.py'}:{name}"
    folder = run("sft", model, tmp_path / "run", hook, *more, "steps=1")
    assert check(step_folder(folder, 1)) == ""
    found = capfd.readouterr()
    assert f"checkpoint.hook {said if name == 'hangs' else 'failed for'}" in found.out + found.err
    assert said in found.out + found.err


@pytest.mark.parametrize(
    ("option", "said", "fix"),
    [
        ("checkpoint.optimizer=false", "checkpoint.optimizer was replaced", "[model,extra]"),
        ("checkpoint.contents=[model,optimiser]", "has 'optimiser'", "hf_model"),
        ("checkpoint.contents=[optimizer]", "checkpoint.contents needs model", "without it"),
        ("checkpoint.load_contents=[hf_model]", "has 'hf_model'", "model, optimizer, extra"),
        ("checkpoint.hook=hooks.py:absent", "checkpoint.hook=hooks.py:absent", "absent"),
        ("checkpoint.hook=hooks.py:number", "is no function", "folder"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    option: str,
    said: str,
    fix: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    (tmp_path / "hooks.py").write_text(HOOKS)
    assert main([*arguments("sft", model, tmp_path, tmp_path / "run"), option]) == 2
    shown = capsys.readouterr().err
    assert said in shown and fix in shown and "Traceback" not in shown
    assert not (tmp_path / "run").exists()


def test_an_adapter_is_exported_apart(model: Path, tmp_path: Path) -> None:
    """The folder is PEFT's, the export has it added, and a run starts from it."""
    lora = ("engine.lora_rank=4", "engine.lora_alpha=8", "engine.target_modules=[q_proj,v_proj]")
    folder = run("sft", model, tmp_path / "run", *lora)
    adapter = folder / "export" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 4)
    assert config["target_modules"] == ["q_proj", "v_proj"]

    pairs = load_file(adapter / "adapter_model.safetensors")
    base, merged = (load_file(path / "model.safetensors") for path in (model, folder / "export"))
    for name, tensor in merged.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        update = torch.zeros(())
        if f"{stem}.lora_A.weight" in pairs:
            update = pairs[f"{stem}.lora_B.weight"] @ pairs[f"{stem}.lora_A.weight"]
            assert update.abs().max() > 1e-4
        np.testing.assert_allclose(tensor, base[name] + update, atol=1e-6, err_msg=name)

    more = (*lora, f"engine.lora_adapter_path={adapter}", "engine.lr=1e-30", "steps=1")
    again = load_file(
        run("sft", model, tmp_path / "again" / "run", *more) / "export" / "model.safetensors"
    )
    for name, tensor in merged.items():
        np.testing.assert_allclose(again[name], tensor, atol=1e-6, err_msg=name)
