"""Plugins are found without a backend being imported, and a bad one harms only those
who select it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_plugins import install, plugin, run

from coupler.config.compose import compose
from coupler.errors import CouplerError, PluginError
from coupler.plugins import Backend
from coupler.plugins.manager import Plugins, accepts
from coupler.run.plan import weight_path

NEEDED = (
    "model.path=/m",
    "data.source=x.jsonl",
    "reward.target=a:b",
    "rollout=toy",
    "algorithm=toy",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path for fake distributions, whose modules are forgotten after
    the test.
    """
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("acme", "coupler_acme", "coupler_engine")):
            del sys.modules[name]


def states(*folders: Path, **variables: str) -> dict[tuple[str, str], dict]:
    done = run("plugins", "--json", folders=folders, **variables)
    assert done.returncode == 0, done.stderr
    return {(row["kind"], row["name"]): row for row in json.loads(done.stdout)["plugins"]}


def test_listing_names_core_and_installed_backends(tmp_path: Path) -> None:
    install(tmp_path, "coupler-engine-acme", plugin("engine", "acme"), version="2.1")
    found = states(tmp_path)
    assert found["engine", "acme"] == {
        "kind": "engine", "name": "acme", "state": "available",
        "distribution": "coupler-engine-acme",
        "version": "2.1", "capabilities": ["weights:full"], "detail": "",
    }  # fmt: skip
    for key in (
        ("transport", "inproc"),
        ("transport", "disk"),
        ("tracker", "jsonl"),
        ("engine", "toy"),
    ):
        assert found[key]["state"] == "available"
        assert found[key]["distribution"] == "coupler-core"


def test_listing_imports_nothing_heavy() -> None:
    heavy = (
        "torch",
        "ray",
        "transformers",
        "vllm",
        "sglang",
        "megatron",
        "hydra",
        "omegaconf",
        "rich",
        "pyarrow",
    )
    probe = (
        "import sys; from coupler.cli import main; main(['plugins']); assert not "
        f"set({heavy}) & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_backend_that_core_declares_exists() -> None:
    """By its source: some need what only another distribution brings, such as torch."""
    plugins = Plugins.load()
    for key, source in plugins.owner.items():
        if source.distribution == "coupler-core":
            module, _, name = plugins.get(*key).target.partition(":")
            spec = find_spec(module)
            assert spec and spec.origin
            assert re.search(rf"^class {name}\b", Path(spec.origin).read_text(), re.MULTILINE), key


def test_broken_plugin_is_a_warning_for_others_and_an_error_when_selected(tmp_path: Path) -> None:
    install(tmp_path, "coupler-engine-acme", "import acme_kernels")
    assert states(tmp_path)["", "acme"]["state"] == "broken"
    for _ in range(10):
        other = run("config", *NEEDED, "engine=toy", folders=(tmp_path,))
        if "takes long to read, and was not waited for" not in other.stderr:
            break  # else the machine has other work
    assert other.returncode == 0
    warnings = [line for line in other.stderr.splitlines() if "acme" in line]
    assert warnings == [
        "coupler: warning: plugin acme (coupler-engine-acme 0.1.0) failed to load: "
        "ModuleNotFoundError: No module named 'acme_kernels'"
    ]
    selected = run("config", *NEEDED, "engine=acme", folders=(tmp_path,))
    assert selected.returncode == 2
    assert (
        "engine=acme cannot be used: the plugin acme (coupler-engine-acme 0.1.0) failed to load"
        in selected.stderr
    )
    assert "pip install --upgrade coupler-engine-acme" in selected.stderr
    assert "No module named 'acme_kernels'" in selected.stderr
    assert "Traceback" not in selected.stderr


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (("coupler_backends()", "coupler_backend()"), "PluginValidationError"),
        (("coupler_backends()", "coupler_backends(typo)"), "PluginValidationError"),
        (("@hookimpl", ""), "implements no hook"),
        (('kind="engine"', 'kind="motor"'), "there is no kind 'motor'"),
        (('name: str = "acme"', 'name: str = "other"'), "Config.name is 'other'"),
        (("return [Backend", "raise SystemExit('no'); return [Backend"), "SystemExit: no"),
    ],
)
def test_mistake_in_a_plugin_breaks_that_plugin_alone(
    folder: Path, change: tuple[str, str], cause: str
) -> None:
    install(folder, "coupler-engine-acme", plugin("engine", "acme").replace(*change))
    install(folder, "coupler-engine-acmegood", plugin("engine", "acmegood"))
    plugins = Plugins.load()
    assert plugins.get("engine", "acmegood").name == "acmegood"
    (row,) = [row for row in plugins.rows() if row.distribution == "coupler-engine-acme"]
    assert row.state == "broken"
    assert cause in row.detail


def test_missing_conf_package_breaks_the_plugin(folder: Path) -> None:
    paths = "\n@hookimpl\ndef coupler_config_paths():\n    return ['acme_conf']\n"
    install(folder, "coupler-engine-acme", plugin("engine", "acme") + paths)
    with pytest.raises(PluginError, match="there is no package acme_conf"):
        Plugins.load().get("engine", "acme")


def test_duplicate_is_an_error_when_selected_and_names_both(folder: Path) -> None:
    install(folder, "coupler-acme-one", plugin("engine", "acme"), version="1.0")
    install(folder, "coupler-acme-two", plugin("engine", "acme"), version="2.0")
    plugins = Plugins.load()
    assert plugins.get("engine", "toy")
    assert "acme" not in plugins.of("engine")
    assert len([line for line in plugins.warnings() if "engine=acme is duplicate" in line]) == 1
    with pytest.raises(PluginError) as error:
        plugins.get("engine", "acme")
    assert "coupler-acme-one 1.0" in str(error.value)
    assert "coupler-acme-two 2.0" in str(error.value)


def test_api_generations() -> None:
    assert [accepts(api, current=3) for api in (1, 2, 3, 4)] == [False, True, True, False]
    assert [accepts(api, current=1) for api in (0, 1, 2)] == [False, True, False]


def test_other_generation_is_listed_refused_and_its_hooks_stay_unused(folder: Path) -> None:
    hook = "\n@hookimpl\ndef coupler_step_end(step, values):\n    return 'called'\n"
    install(folder, "coupler-engine-acme", plugin("engine", "acme", api=7) + hook)
    plugins = Plugins.load()
    (row,) = [row for row in plugins.rows() if row.name == "acme"]
    assert row.state == "incompatible"
    assert "acme" not in plugins.of("engine")
    assert plugins.call("coupler_step_end", step=1, values={}) == []
    with pytest.raises(
        PluginError, match=r"API generation 7.*\n.*pip install --upgrade coupler-core"
    ):
        plugins.get("engine", "acme")


def test_a_hook_that_raises_is_named_and_is_not_asked_about_a_run_without_its_plugin(
    folder: Path,
) -> None:
    hook = "\n@hookimpl\ndef coupler_weight_path(engine):\n    raise SystemExit('mine')\n"
    install(folder, "coupler-engine-acme", plugin("engine", "acme") + hook)
    plugins = Plugins.load()
    config = compose(plugins, [*NEEDED, "engine=toy"]).config
    assert weight_path(config, plugins) == ("full", "inproc")
    with pytest.raises(
        PluginError, match=r"coupler_weight_path of a plugin raised SystemExit\('mine'\).\n  at:  /"
    ):
        weight_path(compose(plugins, [*NEEDED, "engine=acme"]).config, plugins)


def test_missing_text(folder: Path) -> None:
    install(folder, "coupler-rollout-acme", "import acme_kernels")
    lines = Plugins.load().missing("engine", "megatron").splitlines()
    assert lines[0] == "no engine named 'megatron' is installed."
    assert lines[1] == "  try:        pip install coupler-engine-megatron"
    assert lines[2].startswith("  installed:  ")
    assert "toy" in lines[2]
    cause = "ModuleNotFoundError: No module named 'acme_kernels'"
    assert f"  failed to load: acme (coupler-rollout-acme 0.1.0): {cause}" in lines


def test_missing_never_guesses_what_to_install() -> None:
    text = Plugins.load().missing("engine", "tooy")
    assert "did you mean: engine=toy" in text
    assert "pip install" not in text


def test_disabled_and_ad_hoc_plugins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(folder, "coupler-engine-acme", plugin("engine", "acme"))
    (folder / "acme_research.py").write_text(plugin("algorithm", "mine"))
    monkeypatch.setenv("COUPLER_DISABLE_PLUGINS", "coupler-engine-acme")
    monkeypatch.setenv("COUPLER_PLUGINS", "acme_research")
    plugins = Plugins.load()
    assert plugins.get("algorithm", "mine").name == "mine"
    assert [r.state for r in plugins.rows() if r.distribution == "coupler-engine-acme"] == [
        "disabled"
    ]
    with pytest.raises(PluginError, match="disabled by COUPLER_DISABLE_PLUGINS: acme"):
        plugins.get("engine", "acme")


def test_a_plugin_that_reads_the_environment_is_read_again_where_it_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was remembered in another shell names no backend of this one."""
    (folder / "acme_shells.py").write_text(
        """
import os
from coupler.plugins import Backend, hookimpl

@hookimpl
def coupler_backends():
    names = ["always", *(["also"] if "ACME_ALSO" in os.environ else [])]
    return [Backend(kind="transport", name=name, target="acme:Never") for name in names]
"""
    )
    monkeypatch.setenv("COUPLER_PLUGINS", "acme_shells")
    monkeypatch.setenv("ACME_ALSO", "1")
    assert "also" in Plugins.load().complete().declared("transport")

    monkeypatch.delenv("ACME_ALSO")
    plugins = Plugins.load()
    assert plugins.get("transport", "always").name == "always"
    assert "also" not in plugins.declared("transport")
    with pytest.raises(PluginError, match="no transport named 'also'"):
        plugins.get("transport", "also")


def test_second_installation_of_a_plugin_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, version in (("used", "2.0"), ("stale", "1.0")):
        (folder / place).mkdir()
        install(folder / place, "coupler-engine-acme", plugin("engine", "acme"), version=version)
    monkeypatch.syspath_prepend(folder / "stale")
    monkeypatch.syspath_prepend(folder / "used")
    plugins = Plugins.load()
    assert plugins.owner["engine", "acme"].version == "2.0"
    (text,) = plugins.stale
    assert "2.0" in text
    assert "1.0" in text


def test_only_selected_plugins_validate(folder: Path) -> None:
    from coupler.config.compose import compose

    hook = (
        "\n@hookimpl\ndef coupler_validate(config):\n    yield 'acme never agrees'\n    "
        "yield 'and says so twice'\n"
    )
    install(folder, "coupler-engine-acme", plugin("engine", "acme") + hook)
    plugins = Plugins.load()
    assert compose(plugins, [*NEEDED, "engine=toy"]).config.engine.name == "toy"
    with pytest.raises(
        Exception, match="2 problems:\n  - acme never agrees\n  - and says so twice"
    ):
        compose(plugins, [*NEEDED, "engine=acme"])


def test_a_config_that_extends_nothing_is_refused_with_one_sentence(tmp_path: Path) -> None:
    source = plugin("engine", "acme").replace("coupler.EngineConfig", "object")
    install(tmp_path, "coupler-engine-acme", source)
    detail = states(tmp_path)["", "acme"]["detail"]
    assert (
        detail
        == "PluginError: engine=acme: its config class Config does not extend coupler.EngineConfig"
    )


def test_a_backend_without_options_gets_a_config_class(tmp_path: Path) -> None:
    made, again = (Backend(kind="tracker", name="mute", target="a:B") for _ in range(2))
    assert made == again
    assert (made.config().name, [f.name for f in dataclasses.fields(made.config)]) == (
        "mute",
        ["name"],
    )
    install(tmp_path, "coupler-engine-acme", plugin("engine", "acme").replace("config=Config,", ""))
    detail = states(tmp_path)["", "acme"]["detail"]
    assert detail == "TypeError: the backend engine=acme has no config class"


TRAIN = (*NEEDED, "engine=toy")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        # The command that selects it waits a minute.
        pytest.param(
            "import time; time.sleep(1000)",
            "it takes longer than 5 s to import",
            marks=pytest.mark.slow,
        ),
        ("import os; os._exit(0)", "it exited with code 0"),
        ("import os; os.abort()", "it was killed by SIGABRT"),
        # It may answer before it ends with what it killed.
        (
            "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
            ("it was killed by SIGKILL", "PluginError: coupler_engine_acme implements no hook"),
        ),
        ("raise ValueError('\\x1b[31mred')", "ValueError: ?[31mred"),
    ],
)
def test_a_module_that_cannot_be_imported_ends_no_command(
    tmp_path: Path, fault: str, why: str | tuple[str, ...]
) -> None:
    install(tmp_path, "coupler-engine-acme", fault)
    beside = run("config", *TRAIN, folders=(tmp_path,))
    assert (beside.returncode, "Traceback" in beside.stderr) == (0, False)
    assert beside.stdout == run("config", *TRAIN).stdout
    assert states(tmp_path)["", "acme"]["detail"].startswith(why)
    selected = run("config", *NEEDED, "engine=acme", folders=(tmp_path,))
    assert selected.returncode == 2
    assert "engine=acme cannot be used: the plugin acme" in selected.stderr


def test_what_a_module_prints_and_changes_stays_in_its_process(tmp_path: Path) -> None:
    changes = (
        "import os, sys, json, builtins\nprint('PRINTED')\nos.write(2, b'PRINTED')\n"
        "json.dumps = None\nos.environ.clear()\nsys.path.clear()\nos.chdir('/')\n"
    )
    install(tmp_path, "coupler-engine-acme", plugin("engine", "acme") + changes)
    assert states(tmp_path)["engine", "acme"]["state"] == "available"
    beside, alone = (run("config", *TRAIN, folders=f) for f in ((tmp_path,), ()))
    assert (beside.returncode, beside.stdout, beside.stderr) == (0, alone.stdout, alone.stderr)


def test_nobody_takes_a_name_of_core(folder: Path) -> None:
    install(folder, "coupler-engine-acme", plugin("engine", "toy"))
    plugins = Plugins.load().complete()
    assert plugins.get("engine", "toy").target == "coupler.testing.toy:ToyEngine"
    (row,) = [row for row in plugins.rows() if row.distribution == "coupler-engine-acme"]
    assert row.state == "duplicate"
    assert [text for text in plugins.warnings() if "engine=toy is duplicate" in text]


def test_a_distribution_that_is_called_as_core_is_not_used(folder: Path) -> None:
    install(folder, "coupler-core", plugin("engine", "acme"), entry="toy")
    plugins = Plugins.load()
    assert "acme" not in plugins.of("engine")
    assert "toy" in plugins.of("engine")
    assert [text for text in plugins.stale if "whose name it has" in text]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (('kind="engine"', 'kind="engin"'), "only engine, rollout"),
        (('kind="engine"', 'kind="engin"'), "did you mean 'engine'?"),
        (('name="acme"', 'name="a cme"'), "a name has letters, digits"),
        (('target="not_there:Never"', 'target="not_there"'), "write it as package.module:Class"),
        (("return [Backend", "return None; [Backend"), "coupler_backends returns None"),
        (('frozenset({"weights:full"})', '"weights:full"'), "no frozenset of texts"),
        (('frozenset({"weights:full"})', "lambda c: 1 / 0"), "ZeroDivisionError"),
        (("config=Config,", "config=Config, tested={'torch': 'new'},"), "InvalidSpecifier"),
        (("config=Config,", "config=Config, serves=7,"), "serves"),
    ],
)
def test_what_a_backend_must_be(folder: Path, change: tuple[str, str], cause: str) -> None:
    source = plugin("engine", "acme")
    assert change[0] in source
    install(folder, "coupler-engine-acme", source.replace(*change))
    (row,) = [row for row in Plugins.load().rows() if row.distribution == "coupler-engine-acme"]
    assert row.state == "broken"
    assert cause in row.detail


def test_a_capability_that_core_does_not_know_is_named(tmp_path: Path) -> None:
    source = plugin("engine", "acme").replace("weights:full", "weight:full")
    install(tmp_path, "coupler-engine-acme", source)
    sentence = (
        "engine=acme declares 'weight:full', a capability that this core does not know and "
        "never uses; did you mean 'weights:full'? (plugin acme (coupler-engine-acme 0.1.0))"
    )
    for arguments in (("plugins",), ("config", *NEEDED, "engine=acme")):
        assert sentence in run(*arguments, folders=(tmp_path,)).stderr
    assert sentence not in run("config", *TRAIN, folders=(tmp_path,)).stderr


ENGINE = """
from coupler import Engine
class Abstract(Engine):
    def setup(self, rank): ...
class Other: ...
"""


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("acme_gone:Engine", "its target is acme_gone:Engine, and there is no module acme_gone"),
        ("acme_code:Abstrakt", "acme_code has no 'Abstrakt'; did you mean 'Abstract'?"),
        ("acme_code:Abstract", "acme_code:Abstract is abstract: it does not implement adapter"),
        ("acme_code:Other", "acme_code:Other is no subclass of coupler.Engine"),
        ("acme_broken:Engine", "acme_broken:Engine cannot be imported: OSError: no driver"),
    ],
)
def test_a_target_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, target: str, sentence: str
) -> None:
    pytest.importorskip("tokenizers")
    from coupler.testing.models import write_tokenizer, write_toy

    (tmp_path / "acme_code.py").write_text(ENGINE)
    (tmp_path / "acme_broken.py").write_text("raise OSError('no driver')  # Engine")
    source = plugin("engine", "acme").replace("not_there:Never", target)
    install(tmp_path, "coupler-engine-acme", source)
    write_tokenizer(write_toy(tmp_path / "toy"))
    (tmp_path / "x.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (tmp_path / "reward.py").write_text("def score(completion): return 1.0")
    given = (*NEEDED[3:], f"model.path={tmp_path}/toy", f"data.source={tmp_path}/x.jsonl")
    given += (f"reward.target={tmp_path}/reward.py:score",)
    given += ("data.max_prompt_tokens=64", "sampling.max_tokens=4", f"run_dir={tmp_path}/run")

    done = run("train", *given, "engine=acme", folders=(tmp_path,))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "engine=acme of acme (coupler-engine-acme 0.1.0) cannot be used: " in done.stderr
    assert sentence.partition("adapter")[0] in done.stderr
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [("'no'", "^no$"), ("7", "coupler_validate returns 7"), ("[7]", "coupler_validate lists 7")],
)
def test_a_validation_that_answers_otherwise(folder: Path, answer: str, sentence: str) -> None:
    hook = f"\n@hookimpl\ndef coupler_validate(config):\n    return {answer}\n"
    install(folder, "coupler-engine-acme", plugin("engine", "acme") + hook)
    with pytest.raises(CouplerError, match=sentence):
        compose(Plugins.load(), [*NEEDED, "engine=acme"])


def test_a_weight_path_that_names_nothing(folder: Path) -> None:
    hook = "\n@hookimpl\ndef coupler_weight_path(config):\n    return 'full', 'pigeon'\n"
    install(folder, "coupler-engine-acme", plugin("engine", "acme") + hook)
    plugins = Plugins.load()
    config = compose(plugins, [*NEEDED, "engine=acme"]).config
    with pytest.raises(PluginError, match=r"coupler_weight_path of acme .*'pigeon'"):
        weight_path(config, plugins)


def test_a_transport_that_nobody_selects_carries_nothing(folder: Path) -> None:
    source = plugin("transport", "aaa").replace(
        'frozenset({"weights:full"})', 'frozenset({"weights:full", "place:process"})'
    )
    install(folder, "coupler-transport-aaa", source)
    plugins = Plugins.load().complete()
    assert "aaa" in plugins.declared("transport")
    config = compose(plugins, [*TRAIN]).config
    assert weight_path(config, plugins) == ("full", "inproc")
    config = compose(plugins, [*TRAIN, "sync.transport=aaa"]).config
    assert weight_path(config, plugins) == ("full", "aaa")
