"""Commands that look at runs and talk to models, on runs of the toy backends, and a
first run by ``coupler init`` with what is installed.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coupler.cli import main
from coupler.cli.exported import exported
from coupler.cli.parser import COMMANDS
from coupler.run.run_lock import Held, claimed, held
from coupler.system import discovery
from coupler.testing.models import write_tokenizer, write_toy

ROWS = "".join(json.dumps({"prompt": f"{i} + 2", "answer": str(i)}) + "\n" for i in range(6))
REWARD = "def score(completion):\n    return len(set(completion)) / (1 + len(completion))\n"
SLOW = "import time\ndef score(completion):\n    time.sleep(2)\n    return 0.0\n"
RAISES = "def score(completion):\n    raise ValueError('no')\n"


def arguments(folder: Path, name: str, reward: str = REWARD) -> list[str]:
    """Return the command line of a run on the toy backends, in ``folder/runs/name``."""
    (folder / f"{name}.py").write_text(reward)
    return [
        "train", "engine=toy", "rollout=toy", "algorithm=toy", "steps=3",
        f"model.path={folder / 'model'}", f"run_dir={folder / 'runs' / name}",
        f"data.source={folder / 'rows.jsonl'}", "data.max_prompt_tokens=64",
        f"reward.target={folder / name}.py:score", "prompts_per_step=2", "samples_per_prompt=2",
        "sampling.max_tokens=12", f"eval.data.source={folder / 'rows.jsonl'}",
        "eval.data.max_prompt_tokens=64", "eval.every_steps=0", "trackers=[jsonl]",
        "checkpoint.every_steps=1", "checkpoint.keep_last=0", "executor=local",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows, and a run of three steps that ended."""
    folder = tmp_path_factory.mktemp("commands")
    write_tokenizer(write_toy(folder / "model"))
    (folder / "rows.jsonl").write_text(ROWS)
    assert main(arguments(folder, "whole")) == 0
    return folder


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Return the words of each line of ``coupler runs``, by the name of the run."""
    capsys.readouterr()
    assert main(["runs", str(folder)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines}


# --- runs ---


def test_a_run_that_ended_is_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    algorithm, model, step, reward, _, _, state = listed(folder / "runs", capsys)["whole"]
    assert (algorithm, step, state) == ("toy", "3/3", "done")
    assert model == f"{folder.name}/model"
    last = json.loads((folder / "runs/whole/metrics.jsonl").read_text().splitlines()[-1])
    assert float(reward) == pytest.approx(last["reward/mean"], rel=0.01)
    assert [*listed(folder / "runs" / "whole", capsys)] == ["whole"]


def test_a_run_without_metrics_is_done_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(folder, "unwritten"), "trackers=[]"]) == 0
    assert listed(folder / "runs", capsys)["unwritten"][-1] == "done"


def test_a_run_that_raised_has_failed_and_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folder, "failed", RAISES)) == 2
    state = " ".join(listed(folder / "runs", capsys)["failed"][6:])
    assert state.startswith("failed: ") and "gave no valid number" in state


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_alive_and_then_ended(
    folder: Path, capsys: pytest.CaptureFixture[str], how: signal.Signals
) -> None:
    command = [sys.executable, "-m", "coupler", *arguments(folder, how.name, SLOW)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        run, deadline = folder / "runs" / how.name, time.monotonic() + 100
        while not (run / "run.json").is_file():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        assert listed(folder / "runs", capsys)[how.name][-1] == "running"
        assert (run / ".lock").read_text().startswith(f"process {process.pid} on ")
        process.send_signal(how)
        process.wait(60)
    finally:
        process.kill()
        process.wait(30)
    state = "killed" if how == signal.SIGKILL else "interrupted"
    assert listed(folder / "runs", capsys)[how.name][-1] == state


def test_damaged_folders_are_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file, content in (
        ("no_yaml", "config.yaml", b"a: [1"),
        ("a_list", "config.yaml", b"[1, 2]"),
        ("bytes", "config.yaml", bytes(range(256))),
        ("cut", "metrics.jsonl", b'{"step": 4, "reward/mean": 0.5, "run/steps": 9}\n{"st'),
        ("strange", "metrics.jsonl", b'[]\n{"step": "x"}\nnan\n' + b"[" * 100_000),
        ("words", "metrics.jsonl", b'{"step": 1, "reward/mean": "x", "run/steps": null}\n'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("[]")
        (tmp_path / name / file).write_bytes(content)
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    (tmp_path / "other" / "data").mkdir(parents=True)

    found = listed(tmp_path, capsys)
    assert found.keys() == {
        "no_yaml", "a_list", "bytes", "cut", "strange", "words", "folder", "pipe",
    }  # fmt: skip
    for name in ("no_yaml", "a_list", "bytes", "folder", "pipe"):
        assert "damaged:" in found[name], name
    assert found["cut"][2:4] == ["4/9", "0.5"]
    assert found["words"][2:4] == ["1/?", "-"]
    assert {found[name][-1] for name in ("cut", "strange", "words")} == {"failed"}


def test_runs_elsewhere_are_found_by_a_link(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "linked").symlink_to(folder / "runs" / "whole")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "loop").symlink_to("..")
    (tmp_path / "gone").symlink_to("nowhere")
    assert next(iter(listed(tmp_path, capsys))) == "linked"
    assert not [name for name in listed(tmp_path, capsys) if "loop" in name]


def test_a_folder_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no runs\n"


def test_a_lock_is_looked_at_without_a_change(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claimed(run):
        before = (run / ".lock").read_text()
        assert held(run) is Held.BY_A_PROCESS and (run / ".lock").read_text() == before
        (run / "kept").touch()
    assert held(run) is Held.FREE and not (run / ".lock").exists()
    (run / ".lock").write_text(before)
    assert held(run) is Held.LEFT_BEHIND and (run / ".lock").read_text() == before


# --- eval ---


def test_a_checkpoint_is_evaluated_without_a_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "runs" / "whole"
    rewards = {}
    for step in ("1", "2"):
        assert main(["eval", str(run), "--step", step]) == 0
        assert (run / f"export_step_{step}" / "config.json").is_file()
        (line,) = (run / f"eval_{step}" / "metrics.jsonl").read_text().splitlines()
        rewards[step] = json.loads(line)["eval/reward"]
    assert rewards["1"] != rewards["2"], "each has the weights of its step"

    assert main(["eval", str(run)]) == 0
    assert (run / "eval_3" / "eval.jsonl").is_file(), "the export at the end of the run"
    found = listed(folder / "runs", capsys)
    assert found["whole/eval_1"][2] == "-" and found["whole/eval_1"][-1] == "done"


@pytest.mark.parametrize("form", ["./{}", "{}/", ".//{}", "{}/.", "./lr=1"])
def test_the_folder_of_a_run_may_be_written_in_any_form(
    form: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder / "runs")
    if not os.path.lexists("lr=1"):
        Path("lr=1").symlink_to("whole")
    run_dir = f"run_dir={folder / 'runs' / 'formed'}"
    assert main(["eval", form.format("whole"), run_dir, "steps=0"]) == 2
    assert "steps must be at least 1, got 0." in capsys.readouterr().err


def test_a_run_without_an_export_evaluates_its_newest_checkpoint(folder: Path) -> None:
    given = [*arguments(folder, "unexported"), "checkpoint.export=false"]
    assert main(given) == 0
    run = folder / "runs" / "unexported"
    assert not (run / "export").exists()
    assert main(["eval", str(run)]) == 0
    assert (run / "export_step_3").is_dir() and (run / "eval_3" / "eval.jsonl").is_file()


def test_what_cannot_be_evaluated_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(folder / "runs" / "whole"), "--step", "9"]) == 2
    error = capsys.readouterr().err
    assert "the weights after step 9 are not whole" in error and "kept:  step_1, step_2" in error
    damaged = exported(folder / "runs" / "whole", 1) / "config.json"
    text = damaged.read_text()
    damaged.write_text("{")
    assert main(["eval", str(folder / "runs" / "whole"), "--step", "1"]) == 2
    assert "export_step_1 is damaged" in capsys.readouterr().err
    damaged.write_text(text)


# --- chat ---


class Terminal(io.StringIO):
    """Lines that are typed."""

    def isatty(self) -> bool:
        return True


def say(text: str, *given: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", *given])


def test_a_piped_line_has_an_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers of the toy model hold no line feed."""
    run, text = str(folder / "runs" / "whole"), "one\ntwo\n\none\n"
    capsys.readouterr()
    assert say(text, run, monkeypatch=monkeypatch) == 0
    first, second, again = capsys.readouterr().out.splitlines()
    assert first == again, "an empty line starts another conversation, sampled greedily"
    assert first and second

    assert say(text, run, "eval.max_tokens=2", monkeypatch=monkeypatch) == 0
    shorter = capsys.readouterr().out.splitlines()
    assert len(shorter) == 3 and len(shorter[0]) < len(first)


def test_a_model_folder_talks_by_a_chosen_rollout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (str(folder / "model"), "--rollout", "toy", "sampling.max_tokens=6")
    capsys.readouterr()
    assert say("one", *given, monkeypatch=monkeypatch) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert say("", *given, monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == ""


def test_a_terminal_is_asked_for_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("one\n"))
    capsys.readouterr()
    assert main(["chat", str(folder / "model"), "--rollout", "toy"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("> ") and "Ctrl-D ends" in shown.err


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--rollout", "none"), "no rollout named 'none' is installed."),
        (("--rollout", "toy", "data.max_prompt_tokens=3"), "the conversation has"),
        (("--rollout", "toy", "sampling.max_tokens=x"), "sampling.max_tokens takes"),
        (("--rollout", "toy", "--step", "1"), "is no run folder, and --step 1 needs one."),
    ],
)
def test_a_mistake_of_a_chat_is_one_sentence(
    given: tuple[str, ...],
    sentence: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert say("one two three", str(folder / "model"), *given, monkeypatch=monkeypatch) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_no_text_are_one_sentence(locale: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "coupler", "chat", str(folder / "model"), "--rollout", "toy"],
        input=b"one\ntwo \xff\n",
        capture_output=True,
        env={**os.environ, "LC_ALL": locale},
        timeout=200,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert b"a line of the input has NUL, or bytes that are not UTF-8." in done.stderr


def test_a_transformers_model_talks(model: Path) -> None:
    """By the rollout that is taken where none is named."""
    done = subprocess.run(
        [sys.executable, "-m", "coupler", "chat", str(model), "eval.max_tokens=3"],
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 2


# --- init, recipes, plugin new and completion ---


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_init_writes_trains_at_once(elsewhere: Path, model: Path) -> None:
    """Without a terminal, in a process of its own."""

    def run(*given: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "coupler", *given],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = run("init", "first", "--model", str(model)).splitlines()[-1].split()
    assert command == ["train", "it:", "coupler", "train", "--config", "first/recipe.yaml"]
    run("train", "--config", "first/recipe.yaml", "steps=2", "sampling.max_tokens=4")
    lines = (elsewhere / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_what_init_chooses_is_real_before_plugins_are_remembered(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that reads plugins slowly: nothing is known after the grace."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    monkeypatch.setattr(discovery, "GRACE_S", 0.0)
    monkeypatch.setattr(discovery, "MAX_GRACE_S", 0.0)
    assert main(["init", "first", "--model", "somewhere"]) == 0
    recipe = (elsewhere / "first" / "recipe.yaml").read_text()
    assert "name: fsdp" in recipe and "name: hf" in recipe and "toy" not in recipe


def test_a_copied_recipe_plans(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "cp", "smollm2_calculator_cpu", "mine"]) == 0
    assert main(["plan", "--config", "mine/smollm2_calculator_cpu.yaml"]) == 0
    assert "12 steps" in capsys.readouterr().out


def test_a_shell_completes_commands(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert f"({' '.join(COMMANDS)})" in script
    assert "--diff-default" in script


def test_completion_without_its_package_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'coupler-core[completion]'" in capsys.readouterr().err


def test_the_page_of_commands_lists_each() -> None:
    page = (Path(__file__).parents[1] / "docs" / "command-line.md").read_text()
    listed = {match[1] for match in re.finditer(r"^\| `coupler (\w+)", page, re.MULTILINE)}
    assert listed == COMMANDS.keys()


@pytest.mark.parametrize("kind", ["algorithm", "reward", "tracker"])
def test_a_new_plugin_passes_its_kit(kind: str, elsewhere: Path) -> None:
    """The kits of other kinds take minutes; they run for the examples."""
    assert main(["plugin", "new", "mine", "--kind", kind]) == 0
    source = elsewhere / f"coupler-{kind}-mine" / "src"
    target = "coupler_reward_mine:score" if kind == "reward" else "mine"
    paths = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    plugins = {} if kind == "reward" else {"COUPLER_PLUGINS": f"coupler_{kind}_mine.plugin"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs"),
            *("coupler.testing.conformance", "--coupler", f"{kind}={target}"),
        ],
        env={**os.environ, "PYTHONPATH": paths, **plugins},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout
