"""What the commands print, and that mistakes of the user end with code 2 and no
traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from coupler.cli import main
from coupler.config.compose import compose
from coupler.plugins.manager import Plugins
from coupler.system.log import get_logger

NEEDED = [
    "engine=toy", "rollout=toy", "algorithm=toy", "model.path=/m", "data.source=x.jsonl",
    "reward.target=a:b",
]  # fmt: skip


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"coupler {version('coupler-core')}\n"


def test_plugins_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["kind", "name", "state", "distribution", "version", "capabilities"]
    assert any(line.split()[:4] == ["engine", "toy", "available", "coupler-core"] for line in table)
    assert main(["plugins", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["plugins"]
    assert len(rows) == len(table) - 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", *NEEDED, "engine.lrr=1"], "coupler: unknown option engine.lrr."),
        (["train", *NEEDED, "+engine.lrr=1"], "coupler: unknown option engine.lrr."),
        (["train", *NEEDED, "engine.lr=abc"], "coupler: engine.lr takes a number, got 'abc'."),
        (["train", *NEEDED, "steps"], "coupler: 'steps' is no override."),
        (["train", *NEEDED, "engine=nope"], "coupler: no engine named 'nope' is installed."),
        (
            ["train", *NEEDED, "sampling.top_p=0.5"],
            "coupler: sampling.top_p=0.5 needs sampling.top_k",
        ),
        (["train"], "coupler: engine is not chosen."),
        (
            ["train", "--config", "/none.yaml"],
            "coupler: there is no configuration file /none.yaml.",
        ),
        (["train", "--steps=3", *NEEDED], "coupler: unknown argument --steps=3."),
        (["sft", *NEEDED, "model.path=''"], "coupler: model.path is empty"),
        (["eval", *NEEDED], "coupler: eval.data.source is empty"),
        (
            ["plan", *NEEDED, "optimizer_steps_per_batch=3"],
            "coupler: optimizer_steps_per_batch=3 does not divide",
        ),
        (["plugins", "check", "fsdp"], "coupler: coupler plugins takes no check."),
        (["config", "explain", "engine.lrr", *NEEDED], "coupler: unknown option engine.lrr."),
        (
            ["config", "explain", "engine.lr"],
            "coupler: the options of engine are known once one is chosen.",
        ),
    ],
)
def test_mistakes(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if not line.startswith("coupler: warning:")]
    assert lines[0].startswith(sentence)
    assert all(line.startswith("  ") for line in lines[1:])
    assert shown.out == ""


ENTRIES = [
    (
        "trackers=[{name: x}]",
        "trackers takes a list [...] of text, got [{'name': 'x'}].",
        "trackers=[console,jsonl]",
    ),
    (
        "trackers=[null]",
        "trackers takes a list [...] of text, got [None].",
        "trackers=[console,jsonl]",
    ),
    (
        "sampling.stop=[[a]]",
        "sampling.stop takes a list [...] of text, got [['a']].",
        "sampling.stop=[first,second]",
    ),
    (
        "profile.steps=[[1]]",
        "profile.steps takes a list [...] of integer, got [[1]].",
        "profile.steps=[1,2]",
    ),
]


@pytest.mark.parametrize(("override", "sentence", "fix"), ENTRIES)
def test_an_entry_of_a_list_that_is_no_text_or_number(
    override: str, sentence: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, _, value = override.partition("=")
    (tmp_path / "run.yaml").write_text(f"{key}: {value}\n")
    for given in ([override], ["--config", str(tmp_path / "run.yaml")]):
        assert main(["plan", *NEEDED, *given]) == 2
        assert capsys.readouterr().err == f"coupler: {sentence}\n  write it as:  {fix}\n"


@pytest.mark.parametrize("command", [["plugins"], ["plugins", "--json"], ["config", "explain"]])
@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_a_closed_pipe_ends_a_command_quietly(command: list[str], unbuffered: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, *unbuffered, "-m", "coupler.cli", *command],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_behind_stdout_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "coupler.cli", "config"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    said = b"coupler: what is printed cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_letter_that_stdout_has_no_bytes_for_is_escaped() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "coupler.cli", "config", "run_dir='runs/日本'"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rb"run_dir: runs/\u65e5\u672c" in done.stdout


def test_a_pipe_of_something_else_that_breaks_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Plugins:
        raise BrokenPipeError

    monkeypatch.setattr(Plugins, "load", broken)
    with pytest.raises(BrokenPipeError):
        main(["plugins"])


@pytest.mark.parametrize(
    "command", ["train", "sft", "eval", "plan", "doctor", "config", "replay", "show", "export"]
)
def test_help_leads_to_the_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = capsys.readouterr().out
    for text in (
        "sections: model, critic, teacher, data,",
        "engine, rollout, algorithm",
        "  coupler config explain sampling",
    ):
        assert text in shown
    assert main(["config", "explain", "sampling"]) == 0
    assert "sampling.top_p" in capsys.readouterr().out


def test_help_of_plugins_has_no_options_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plugins", "--help"])
    assert "explain" not in capsys.readouterr().out


def test_the_level_of_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COUPLER_LOG", "loud")
    assert main(["plugins"]) == 2
    assert capsys.readouterr().err == (
        "coupler: COUPLER_LOG=loud is no level.\n  set it to:  debug, info, warning, error\n"
    )
    for level, shown in (("warning", True), ("ERROR", False), ("", True)):
        monkeypatch.setenv("COUPLER_LOG", level)
        assert main(["config", "engine=toy", "--diff-default"]) == 0
        capsys.readouterr()
        get_logger("coupler.test").warning("look")
        assert capsys.readouterr().err == ("coupler: warning: look\n" if shown else "")


def test_a_program_with_a_handler_of_its_own_keeps_it() -> None:
    code = (
        "import logging, sys; mine = logging.StreamHandler(sys.stdout); "
        "logging.getLogger('coupler').addHandler(mine); "
        "from coupler.system.log import get_logger; get_logger('coupler.x').warning('hello')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("hello\n", "")


def test_interrupt_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> Plugins:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plugins, "load", interrupted)
    assert main(["plugins"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_resolved_config_composes_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *NEEDED, "engine.lr=0.25"]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    plugins = Plugins.load()
    again = compose(plugins, [], str(tmp_path / "run.yaml")).config
    assert again == compose(plugins, [*NEEDED, "engine.lr=0.25"]).config


def test_config_of_an_unfinished_run_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--diff-default", "steps=5"]) == 0
    assert capsys.readouterr().out == "steps: 5  # default 100; command line\n"


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "engine.lr", *NEEDED]) == 0
    assert "coupler.testing.toy_config:ToyEngineConfig" in capsys.readouterr().out


def test_explain_says_what_a_source_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "eval.data.source", *NEEDED]) == 0
    said = "takes:     text (a file, pattern, folder or function), or a list [...] of such"
    assert said in capsys.readouterr().out


def test_overrides_may_stand_on_both_sides_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("steps: 3\nseed: 4\n")
    assert (
        main(
            [
                "config",
                "--diff-default",
                "seed=5",
                "--config",
                str(tmp_path / "run.yaml"),
                "max_staleness=1",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "steps: 3  #" in shown
    assert "seed: 5  #" in shown
    assert "max_staleness: 1  #" in shown


def test_plan_counts_the_rows_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' * 40)
    small = ["data.max_prompt_tokens=100", "sampling.max_tokens=28"]
    assert main(["plan", *NEEDED, *small, f"data.source={file}", "prompts_per_step=4"]) == 0
    assert "10 steps per epoch, 10 epochs" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["x" * 300 + ".jsonl", "rows.jsonl/inside.jsonl"])
def test_plan_of_rows_that_are_nowhere(
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    small = ["data.max_prompt_tokens=100", "sampling.max_tokens=28"]
    assert main(["plan", *NEEDED, *small, f"data.source={source}"]) == 0
    assert "per epoch" not in capsys.readouterr().out


def test_plan_imports_no_backend() -> None:
    probe = (
        "import sys; from coupler.cli import main; code = main(['plan', "
        f"'data.max_prompt_tokens=9', *{NEEDED}]); "
        "sys.exit(code or bool({'torch', 'transformers', 'coupler.testing.toy'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
