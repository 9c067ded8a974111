"""A file of options names others in ``defaults``, as in Hydra, and a plugin ships
presets of a whole run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_plugins import install, plugin

from coupler.cli import main
from coupler.config.compose import Composed, compose
from coupler.errors import ConfigError, CouplerError
from coupler.plugins.manager import Plugins

NEEDED = "model: {path: /m}\nrollout: toy\nalgorithm: toy\ndata: {source: x.jsonl}\n"
REWARD = "reward: {target: a:b}\n"
PATHS = "\n@hookimpl\ndef coupler_config_paths():\n    return ['acme_runs']\n"


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Plugins:
    """A plugin with ``engine=acme``, and a preset of a whole run that chooses it."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "coupler-engine-acme", plugin("engine", "acme") + PATHS)
    presets = folder / "acme_runs" / "preset"
    presets.mkdir(parents=True)
    (folder / "acme_runs" / "__init__.py").touch()
    chosen = "defaults: [{engine: acme}, _self_]\nengine: {lr: 0.5}\nsteps: 4\nseed: 4\n"
    (presets / "small.yaml").write_text(f"# A small run. It ends soon.\n{chosen}")
    (presets / "smaller.yaml").write_text("defaults: [{preset: small}]\nsteps: 2\n")
    (presets / "odd.yaml").write_text("defaults: [base]\n")
    (presets / "wrong.yaml").write_text("defaults: [{preset: small}]\nsteeps: 2\n")
    sys.path.insert(0, str(folder))
    yield Plugins.load()
    sys.path.remove(str(folder))
    for name in ("coupler_engine_acme", "acme_runs"):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run(plugins: Plugins, *overrides: str, file: str | None = "run.yaml") -> Composed:
    return compose(plugins, [*overrides], file)


def test_later_files_win_and_the_own_values_come_last(plugins: Plugins, folder: Path) -> None:
    write(
        folder,
        base=NEEDED + REWARD + "engine: {name: acme, lr: 0.5}\nsteps: 1\nseed: 1\n",
        more="steps: 2\nseed: 2\nengine: {shape: very_flat}\n",
        run="defaults: [base, more.yaml]\nseed: 3\n",
        first="defaults: [base, _self_, more]\nseed: 3\n",
    )
    found = run(plugins)
    config = found.config
    assert (config.steps, config.seed, config.engine.lr) == (2, 3, 0.5)
    assert config.engine.shape.value == "very_flat"
    assert [found.origin[key] for key in ("engine.lr", "steps", "seed")] == [
        "base.yaml",
        "more.yaml",
        "run.yaml",
    ]
    assert {"steps", "seed", "engine.lr"} <= {*found.set_keys}
    assert run(plugins, file="first.yaml").config.seed == 2
    assert run(plugins, "seed=9").config.seed == 9


def test_a_group_is_a_folder_beside_or_a_choice(plugins: Plugins, folder: Path) -> None:
    """Paths are looked for beside the file that has them."""
    write(
        folder,
        run="defaults: [base, {engine: fast}, {data: sums}, {engine@critic.engine: fast}]\n",
        base=NEEDED + REWARD,
        engine__fast="defaults: [shared]\nname: acme\nlr: 0.25\n",
        engine__shared="lr: 0.1\nshape: very_flat\n",
        data__sums="source: sums.jsonl\n",
        chosen="defaults: [base, {engine: acme}]\n",
    )
    (folder / "data" / "sums.jsonl").touch()
    config = run(plugins, "algorithm=toy").config
    assert (config.engine.lr, config.engine.shape.value) == (0.25, "very_flat")
    assert config.critic.engine.lr == 0.25
    assert config.data.source == "data/sums.jsonl"
    assert run(plugins, file="chosen.yaml").config.engine.name == "acme"


@pytest.mark.parametrize(
    ("files", "sentence", "fix"),
    [
        ({"run": "defaults: base\n"}, "run.yaml: defaults is 'base'.", "a list of FILE"),
        ({"run": "defaults: [{a: b, c: d}]\n"}, "run.yaml: defaults has the entry {'a'", "GROUP"),
        ({"run": "defaults: [{a: null}]\n"}, "run.yaml: defaults has the entry {'a': None}.", "a"),
        ({"run": "defaults: [{override a: b}]\n"}, "run.yaml: defaults has the entry", "GROUP"),
        ({"run": "defaults: [3]\n"}, "run.yaml: defaults has the entry 3.", "a list of FILE"),
        ({"run": "defaults: [base]\n"}, "run.yaml: defaults names base", "the file base.yaml"),
        (
            {"run": "defaults: [{data: sums}]\n"},
            "run.yaml: defaults names data: sums, and there is none.",
            "the file data/sums.yaml",
        ),
        ({"run": "defaults: [run]\n"}, "run.yaml: defaults name this file twice", "each file once"),
        (
            {"run": "defaults: [base]\n", "base": "defaults: [run]\n"},
            "run.yaml: defaults name this file twice, or lead back to it.",
            "each file once",
        ),
        (
            {"run": "defaults: [base, base]\n", "base": "steps: 1\n"},
            "run.yaml: defaults names base twice.",
            "it once",
        ),
        (
            {"run": "defaults: [base]\n", "base": "- steps\n"},
            "base.yaml is a list, but a configuration is a mapping",
            "steps: 50",
        ),
        (
            {"run": "defaults: [base]\n", "base": "steps: [\n"},
            "base.yaml is not readable as YAML",
            "steps: 50",
        ),
        ({"run": "defaults: [{preset: smal}]\n"}, "no preset named 'smal' is installed.", "small"),
        ({"run": "defaults: [{preset: odd}]\n"}, "preset odd: defaults names base", "GROUP: NAME"),
    ],
)
def test_a_wrong_list_is_one_sentence_with_file_and_fix(
    files: dict[str, str], sentence: str, fix: str, plugins: Plugins, folder: Path
) -> None:
    write(folder, **files)
    with pytest.raises(CouplerError) as raised:
        run(plugins)
    first, rest = str(raised.value).split("\n", 1)
    assert sentence in first and fix in rest


@pytest.mark.parametrize(
    ("base", "key"),
    [
        ("engine: {name: acme, lrr: 1}\n", "engine.lrr"),
        ("sampling: 3\nengine: acme\n", "sampling"),
        ("engine: acme\nsteps: x\n", "steps"),
    ],
)
def test_a_wrong_key_names_the_file_that_has_it(
    base: str, key: str, plugins: Plugins, folder: Path
) -> None:
    write(folder, base=NEEDED + REWARD + base, run="defaults: [base]\nseed: 1\n")
    with pytest.raises(ConfigError) as raised:
        run(plugins)
    lines = str(raised.value).splitlines()
    assert key in lines[0] and lines[-1] == "  in:  base.yaml"


def test_too_many_files_are_refused(plugins: Plugins, folder: Path) -> None:
    write(
        folder, run="defaults: [f0]\n", **{f"f{i}": f"defaults: [f{i + 1}]\n" for i in range(120)}
    )
    with pytest.raises(ConfigError, match=r"f99.yaml: defaults name more than 100 files."):
        run(plugins)


def test_a_plugin_ships_a_preset_of_a_whole_run(plugins: Plugins, folder: Path) -> None:
    """It lies below the file, and a preset may build on another one."""
    write(
        folder,
        run=NEEDED + REWARD + "seed: 3\n",
        named=f"defaults: [{{preset: small}}]\n{NEEDED}{REWARD}",
    )
    found = run(plugins, "preset=smaller")
    config = found.config
    assert (config.engine.name, config.engine.lr, config.steps, config.seed) == ("acme", 0.5, 2, 3)
    assert [found.origin[key] for key in ("engine.lr", "steps", "seed")] == [
        "preset small",
        "preset smaller",
        "run.yaml",
    ]
    assert "steps" not in found.set_keys and "seed" in found.set_keys
    assert run(plugins, file="named.yaml").config.steps == 4

    with pytest.raises(CouplerError, match=r"unknown option steeps\.") as raised:
        run(plugins, "preset=wrong")
    assert str(raised.value).endswith("\n  in:  preset wrong")
    for wrong in ("preset=", "preset=3"):
        with pytest.raises(ConfigError, match=r"the command line: preset takes the name"):
            run(plugins, wrong)


def test_the_list_of_recipes_has_the_presets_of_plugins(
    plugins: Plugins, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["preset=small", "A", "small", "run"] in lines


def test_the_command_line_says_what_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, run="defaults: [base]\n")
    assert main(["plan", "--config", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("coupler: run.yaml: defaults names base, and there is none.\n  try:  ")
