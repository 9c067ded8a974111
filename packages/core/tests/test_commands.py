"""Commands that write files, and paths of a recipe. None needs an engine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from coupler.cli import main
from coupler.cli.commands.plugin import renamed
from coupler.cli.parser import COMMANDS, make_parser
from coupler.cli.shipped import shipped
from coupler.config.compose import compose
from coupler.config.overrides import read_file
from coupler.plugins.manager import Plugins

TAKE_OPTIONS = {
    "train", "sft", "eval", "plan", "doctor", "config", "replay", "show", "export", "chat",
}  # fmt: skip
KINDS = ("algorithm", "engine", "reward", "rollout", "sharding", "tracker", "transport")


@pytest.mark.parametrize("module", ["coupler", "coupler.cli"])
def test_the_module_is_the_command(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"coupler {version('coupler-core')}\n"
    done = subprocess.run(
        [sys.executable, "-m", module, "train"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("coupler: engine is not chosen.")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_arguments_of_a_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = capsys.readouterr().out
    (commands,) = make_parser(command)._subparsers._group_actions  # type: ignore[union-attr]
    actions = commands.choices[command]._actions  # type: ignore[union-attr, call-overload]
    assert len(actions) > 1
    assert all(flag in shown for action in actions for flag in action.option_strings)
    assert ("coupler config explain" in shown) == (command in TAKE_OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["recipes", "cp", "smollm2_gues_cpu"], "there is no recipe smollm2_gues_cpu."),
        (["recipes", "mv"], "argument cp: invalid choice: 'mv'"),
        (["recipes", "steps=3"], "argument cp: invalid choice: 'steps=3'"),
        (["recipes", "cp"], "the following arguments are required: NAME."),
        (["runs", "nowhere"], "there is no folder nowhere."),
        (["runs", ".", "more"], "coupler runs takes no more."),
        (["init", "first", "steps=3"], "coupler init takes no steps=3."),
        (["chat"], "the following arguments are required: RUN|MODEL"),
        (["chat", "nowhere"], "nowhere is no run folder, which has config.yaml, and no model"),
        (["chat", "nowhere", "--step", "2"], "nowhere is no run folder, and --step 2 needs one."),
        (["eval", "--step", "2"], "--step needs the folder of a run."),
        (["eval", "nowhere"], "nowhere is no run folder: it has no config.yaml."),
        (["eval", "nowhere", "--config", "x.yaml"], "coupler eval nowhere has the run's config"),
        (["plugin"], "the following arguments are required: new."),
        (["plugin", "new", "mine"], "the following arguments are required: --kind."),
        (["plugin", "new", "mine", "--kind", "rewrd"], "--kind rewrd is none."),
        (["plugin", "new", "My-Loss", "--kind", "engine"], "'My-Loss' is no name of a plugin."),
        (["plugin", "new", "toy", "--kind", "engine"], "engine=toy is installed already"),
        (["completion", "fish"], "argument shell: invalid choice: 'fish'"),
        (["recipe"], "argument COMMAND: invalid choice: 'recipe'"),
        (["plan", "run.yaml"], "'run.yaml' is no override.\n  try:  --config run.yaml"),
        (["plan", "--config", "a.yaml", "--config=b.yaml"], "--config is given twice."),
        (["plan", "--device-gib", "nan"], "--device-gib must be above 0 and below 1e+06, got nan."),
        (["plan", "--device-gib", "inf"], "--device-gib must be above 0 and below 1e+06, got inf."),
        (["eval", __file__], f"{__file__} is a file, and no run folder."),
        (["show", __file__], f"{__file__} is a file, and no run folder."),
    ],
)
def test_mistakes(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    _, *rest = shown.err.splitlines()
    assert shown.err.startswith(f"coupler: {sentence}")
    assert all(line.startswith("  ") for line in rest)
    assert shown.out == "" and not [*tmp_path.iterdir()]


# --- paths of a recipe ---


def test_a_path_beside_the_recipe_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("recipes/train.jsonl", "train.jsonl", "recipes/reward.py", "other.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    for name in (
        *("recipes/models/small", "recipes/runs/mine", "models/large"),
        *("recipes/fsdp", "recipes/math", "recipes/none", "recipes/auto"),
    ):
        Path(name).mkdir(parents=True)
    Path("recipes/run.yaml").write_text(
        "engine: fsdp\n"
        "model: {path: models/small}\n"
        "critic.model.path: models/large\n"
        "teacher: {models: {none: math, math: large}}\n"
        "algorithm: {kl: none}\n"
        "checkpoint: {resume: auto}\n"
        "eval: {data: {source: math, columns: {source: math}}}\n"
        "data: {source: [train.jsonl, other.jsonl, '*.jsonl', /tmp], system_prompt: Be nice.}\n"
        "reward: {target: 'reward.py:score'}\n"
        "run_dir: runs/mine\n"
    )

    assert read_file("recipes/run.yaml") == {
        "engine": {"name": "fsdp"},
        "model": {"path": "recipes/models/small"},
        "critic": {"model": {"path": "models/large"}},
        "teacher": {"models": {"none": "recipes/math", "math": "large"}},
        "algorithm": {"kl": "none"},
        "checkpoint": {"resume": "auto"},
        "eval": {"data": {"source": "recipes/math", "columns": {"source": "math"}}},
        "data": {
            "source": ["recipes/train.jsonl", "other.jsonl", "recipes/*.jsonl", "/tmp"],
            "system_prompt": "Be nice.",
        },
        "reward": {"target": "recipes/reward.py:score"},
        "run_dir": "runs/mine",
    }


def test_what_a_run_wrote_is_not_looked_for_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for name in ("train.jsonl", "run/train.jsonl", "run/run.json"):
        Path(name).touch()
    Path("run/config.yaml").write_text("data: {source: train.jsonl}\n")
    assert read_file("run/config.yaml") == {"data": {"source": "train.jsonl"}}


def test_a_file_in_the_working_folder_is_read_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was started before goes on: its configuration is the same text."""
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").touch()
    Path("run.yaml").write_text("data: {source: ./train.jsonl}\n")
    assert read_file("run.yaml") == {"data": {"source": "./train.jsonl"}}


# --- recipes ---


def test_recipes_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    files = {*shipped("recipes").rglob("*.yaml")}
    assert head.split() == ["recipe", "needs", "about"]
    assert len(lines) == len(files) > 10
    assert any(line.startswith("smollm2_preferences/2_dpo ") for line in lines)
    for line in lines:
        assert len(line.split()) > 5, "every recipe says what it is"


def test_a_recipe_that_needs_more_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Plugins, "declared", lambda *_: {"fsdp": None, "grpo": None})
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("smollm2_fsdp_vllm_1gpu")]
    assert line.split()[1] == "rollout=vllm"


@pytest.mark.parametrize("folder", ["", "mine", "deep/er"])
def test_a_recipe_is_copied_with_what_it_names(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [folder] if folder else []
    assert main(["recipes", "cp", "smollm2_guess_cpu", *given]) == 0
    shown = capsys.readouterr().out
    copied = tmp_path / folder
    assert {path.name for path in copied.iterdir()} == {
        "smollm2_guess_cpu.yaml",
        "guess.py",
        "smollm2.py",
    }
    command = f"coupler train --config {Path(folder) / 'smollm2_guess_cpu.yaml'}"
    assert shown.splitlines()[-1] == f"  run it:  {command}"

    values = read_file(str(Path(folder) / "smollm2_guess_cpu.yaml"))
    named = (values["model"]["path"], values["data"]["source"], values["environment"]["target"])
    assert all(Path(name.partition(":")[0]).is_file() for name in named)
    assert main(["recipes", "cp", "smollm2_calculator_cpu", *given]) == 0, "smollm2.py is the same"

    (copied / "guess.py").write_text("mine")
    capsys.readouterr()
    assert main(["recipes", "cp", "smollm2_guess_cpu", *given]) == 2
    assert f"{Path(folder) / 'guess.py'} exists already" in capsys.readouterr().err
    assert (copied / "guess.py").read_text() == "mine"


def test_a_folder_of_recipes_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "cp", "smollm2_preferences/", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("run it:") == 4
    values = read_file(str(tmp_path / "smollm2_preferences" / "1_sft.yaml"))
    assert values["model"]["path"] == f"{tmp_path / 'smollm2.py'}:folder"


def test_every_recipe_s_files_are_beside_it() -> None:
    for path in shipped("recipes").rglob("*.yaml"):
        text = path.read_text()
        assert "coupler " in text.partition("\nmodel:")[0], f"{path} has its command"
        values = yaml.safe_load(text)
        assert "recipes/" not in yaml.safe_dump(values), path


# --- init, with nothing but core: the toy backends ---


def test_init_takes_what_is_installed_and_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "first"
    assert main(["init", str(folder), "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == (
        f"  train it:  coupler train --config {folder / 'recipe.yaml'}"
    )

    composed = compose(Plugins.load(), [], str(folder / "recipe.yaml"))
    assert composed.config.model.path == str(tmp_path)
    assert composed.config.data.source == str(folder / "train.jsonl")
    (folder / "reward.py").write_text("mine")
    assert main(["init", str(folder), "--model", str(tmp_path)]) == 2
    assert "reward.py exists already; nothing was written." in capsys.readouterr().err
    assert (folder / "reward.py").read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["a b", "c: d", "e #f", 'it\'s "quoted"', "back\\slash", "\t", "é"]
)
def test_a_folder_may_have_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ``init`` writes reads back, and what commands print can be typed."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", name, "--model", f"models/{name}"]) == 0
    *_, typed = capsys.readouterr().out.rpartition("  train it:  ")
    assert shlex.split(typed) == ["coupler", "train", "--config", f"{name}/recipe.yaml"]

    config = compose(Plugins.load(), [], f"{name}/recipe.yaml").config
    assert config.run_dir == f"runs/{name}"
    assert config.model.path == str(tmp_path / "models" / name)

    assert main(["recipes", "cp", "smollm2_guess_1gpu", name]) == 0
    *_, typed = capsys.readouterr().out.rpartition("  run it:  ")
    recipe = f"{name}/smollm2_guess_1gpu.yaml"
    given = ["coupler", "train", "--config", recipe, "rollout.name=sglang"]
    assert shlex.split(typed) == given


def test_a_link_to_itself_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    loop, page = str(tmp_path / "loop"), str(tmp_path / "page.html")
    assert main(["report", loop, "--html", page]) == 2
    assert f"coupler: {loop}" in capsys.readouterr().err
    assert main(["init", loop]) == 2
    assert f"coupler: {loop}" in capsys.readouterr().err


# --- plugin new ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_is_the_example_of_its_kind(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kit of every example runs in tests/test_examples.py."""
    folder = tmp_path / "made"
    assert main(["plugin", "new", "my_own", "--kind", kind, "--out", str(folder)]) == 0
    target = "coupler_reward_my_own:score" if kind == "reward" else "my_own"
    assert f"--coupler {kind}={target}\n" in capsys.readouterr().out

    project = (folder / "pyproject.toml").read_text()
    assert f'name = "coupler-{kind}-my_own"' in project
    package = folder / "src" / f"coupler_{kind}_my_own"
    assert (package / "__init__.py").is_file()
    for file in package.glob("*.py"):
        compile(file.read_text(), str(file), "exec")
    if kind != "reward":
        assert f'= "coupler_{kind}_my_own.plugin"' in project
        assert 'name: str = "my_own"' in (package / "plugin.py").read_text()
        assert "class MyOwn" in (package / "plugin.py").read_text()
    assert main(["plugin", "new", "my_own", "--kind", kind, "--out", str(folder)]) == 0, (
        "the same again"
    )
    (folder / "README.md").write_text("mine")
    assert main(["plugin", "new", "my_own", "--kind", kind, "--out", str(folder)]) == 2


def test_words_of_a_sentence_keep_theirs() -> None:
    text = (
        '"""``engine=plain``: a plain model."""\nclass PlainEngine(Engine): ...\n"plain"\n'
        "Plain words.\nplain_sync = 1\n"
    )
    assert renamed(text, "plain", "my_own") == (
        '"""``engine=my_own``: a plain model."""\nclass MyOwnEngine(Engine): ...\n"my_own"\n'
        "Plain words.\nmy_own_sync = 1\n"
    )
