"""The tool python: in this machine's sandbox, at a URL, and refused without both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fusion_server import serving
from playing import TASK, TOOLS, Played, call

from coupler import CouplerError, Task
from coupler.conversation import Codec
from coupler.errors import ConfigError
from coupler.plugins.finding import Verdict
from coupler.rewards import check_reward, sandbox
from coupler_agents.doctor import findings
from coupler_agents.sandbox import Sandbox, SandboxFailed, SandboxLimits, run_python
from coupler_agents.sandbox.parent import why_none
from coupler_agents.tools.config import CallFormat, ToolsConfig
from coupler_agents.tools.environment import ToolEnvironment

here = pytest.mark.skipif(bool(why_none()), reason=why_none())


def task(files: dict[str, Any]) -> Task:
    kwargs = {"tools_kwargs": {"python": {"create_kwargs": {"files": files}}}}
    return Task(TASK.messages, {**TASK.row, **kwargs}, 7)


def python(*programs: str) -> list[str]:
    """Return the turns that run programs, one after the other."""
    return [*(call("python", code=code) for code in programs), "done"]


@here
@pytest.mark.parametrize("calls", CallFormat)
def test_state_is_kept_over_the_calls_of_an_episode(codec: Codec, calls: CallFormat) -> None:
    says = python("x = open('in/data.txt').read()", "print(x * 2)\nlen(x)", "1 / 0")
    played = Played(codec, says, task({"in/data.txt": "four"}), builtin=["python"], calls=calls)
    assert "fourfour\n4" in played.shown
    assert "ZeroDivisionError: division by zero" in played.shown
    assert "Variables, imports and files are kept" in played.shown
    (row,) = played.rows
    assert len(row.trained) == 4
    counted = played.outcome.metrics
    assert (counted["tool_calls"], counted["tool_errors"], counted["tool_timeouts"]) == (3, 0, 0)


@here
def test_calls_of_one_turn_share_an_interpreter(codec: Codec) -> None:
    both = "\n".join(call("python", code=code) for code in ("x = 20", "x + 3"))
    played = Played(codec, [both, "done"], builtin=["python"], calls=CallFormat.TEXT)
    assert "23" in played.shown


@here
@pytest.mark.parametrize(
    ("program", "seconds", "told", "counted"),
    [
        ("print('half'); import os; os._exit(1)", 30.0, "exited with code 1", "tool_errors"),
        ("print('half')\nwhile True: pass", 3.0, "took longer than 3 seconds", "tool_timeouts"),
    ],
)
def test_the_policy_is_told_that_state_was_lost(
    codec: Codec, program: str, seconds: float, told: str, counted: str
) -> None:
    """The episode goes on with a fresh interpreter, which has the files of the row."""
    says = python("x = 1", program, "'x' in globals(), open('a').read()")
    played = Played(
        codec,
        says,
        task({"a": "again"}),
        builtin=["python"],
        calls=CallFormat.TEXT,
        call_timeout_s=seconds,
    )
    assert f"Error: the program {told}." in played.shown and "are lost" in played.shown
    assert "half" in played.shown and "(False, 'again')" in played.shown
    assert played.outcome.metrics[counted] == 1


@here
def test_what_a_program_prints_is_cut(codec: Codec) -> None:
    says = python("print('y' * 10**7)")
    played = Played(codec, says, builtin=["python"], max_result_characters=100)
    assert "y" * 100 in played.shown and "y" * 101 not in played.shown
    assert played.outcome.metrics["tool_truncated"] == 1


@here
def test_a_traceback_is_shown_however_much_was_printed(codec: Codec) -> None:
    says = python("print('y' * 10**5)\n1 / 0")
    played = Played(codec, says, builtin=["python"], max_result_characters=300)
    assert "ZeroDivisionError" in played.shown and "It printed:\nyyy" in played.shown


@here
def test_code_that_is_no_text_is_told(codec: Codec) -> None:
    says = [call("python", code=3), call("python", code="\ud800"), call("python"), "done"]
    played = Played(codec, says, builtin=["python"], calls=CallFormat.TEXT)
    assert "the code is no text" in played.shown and "SyntaxError" in played.shown
    assert played.outcome.metrics["tool_errors"] == 2


@here
def test_episodes_do_not_see_each_other(codec: Codec) -> None:
    first = Played(codec, python("x = 1\nopen('a', 'w').write('1')"), builtin=["python"])
    second = Played(
        codec, python("import os\n('x' in globals(), os.listdir('.'))"), builtin=["python"]
    )
    assert first.outcome.metrics["tool_errors"] == 0 and "(False, [])" in second.shown


@here
@pytest.mark.parametrize("files", [{"../a": "x"}, {"a": 1}, ["a"]])
def test_files_of_a_row_that_cannot_be_given_are_a_failure(codec: Codec, files: Any) -> None:
    with pytest.raises(SandboxFailed, match=r"tools_kwargs\.python\.create_kwargs\.files"):
        Played(codec, python("1"), task(files), builtin=["python"])


@here
def test_programs_run_at_a_url(codec: Codec) -> None:
    """Each call runs alone, with the files of the row."""
    says = python("x = 5\nprint(open('a').read())", "print('x' in globals())", "1 / 0")
    with serving() as (url, asked):
        played = Played(
            codec,
            says,
            task({"a": "a file"}),
            builtin=["python"],
            sandbox_url=url,
            calls=CallFormat.TEXT,
            call_timeout_s=5.0,
        )
    assert "a file" in played.shown and "False" in played.shown
    assert "ZeroDivisionError" in played.shown and "starts anew" in played.shown
    assert [path for path, _ in asked] == ["/run_code"] * 3
    sent = asked[0][1]
    assert (sent["run_timeout"], sent["memory_limit_MB"]) == (5.0, 1024)


@here
def test_a_program_that_is_slow_at_a_url_is_told(codec: Codec) -> None:
    says = python("while True: pass", "import sys; sys.exit(3)")
    with serving() as (url, _):
        played = Played(
            codec, says, builtin=["python"], sandbox_url=url, call_timeout_s=1.0, calls="text"
        )
    assert "took longer than 1 seconds" in played.shown and "exited with code 3" in played.shown
    assert played.outcome.metrics["tool_timeouts"] == 1


@here
def test_a_reward_runs_a_program_at_a_url() -> None:
    with serving() as (url, _):
        ran = run_python(
            "open('o', 'w').write(input() + open('i').read())",
            stdin="one ",
            files={"i": "two"},
            fetch=["o"],
            url=url,
        )
    assert ran.files == {"o": b"one two"} and ran.code == 0


ANSWERS: dict[str, tuple[tuple[int, str], str]] = {
    "status": ((500, "out of memory"), "answers 500: out of memory"),
    "text": ((200, "<html>"), "does not answer in JSON"),
    "deep": ((200, "[" * 100_000), "does not answer in JSON"),
    "list": ((200, "[1]"), "does not answer as a SandboxFusion server does"),
    "empty": ((200, "{}"), "does not answer as a SandboxFusion server does"),
    "no result": (
        (200, json.dumps({"status": "Success", "run_result": None})),
        "does not answer as a SandboxFusion server does",
    ),
    "wrong kinds": (
        (200, json.dumps({"status": "Success", "run_result": {"status": 1, "stdout": 3}})),
        "does not answer as a SandboxFusion server does",
    ),
    "error": (
        (200, json.dumps({"status": "SandboxError", "message": "no pods"})),
        "the sandbox failed: no pods",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_server_that_fails_is_a_failure_of_the_episode(codec: Codec, name: str) -> None:
    """The policy is told nothing: it is no answer to its program."""
    fixed, told = ANSWERS[name]
    with serving(fixed) as (url, _), pytest.raises(SandboxFailed, match=told):
        Played(codec, python("1"), builtin=["python"], sandbox_url=url)


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with serving() as (url, _):
        pass
    with pytest.raises(SandboxFailed, match="cannot be reached"):
        run_python("1", url=url)
    with pytest.raises(SandboxFailed, match="no address"):
        ToolEnvironment(ToolsConfig(builtin=["python"], sandbox_url="localhost:80"))


def test_without_a_sandbox_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "why_no_bubblewrap", lambda: "bwrap is not installed")
    with pytest.raises(ConfigError, match="bwrap is not installed") as refused:
        ToolEnvironment(ToolsConfig(builtin=["python"]))
    assert "environment.sandbox_url=" in str(refused.value)
    assert ToolEnvironment(ToolsConfig(builtin=["python"], sandbox_url="http://h:1")).schemas
    with pytest.raises(SandboxFailed, match="bwrap is not installed"):
        run_python("1", limits=SandboxLimits(processes=33))


def test_a_second_tool_of_that_name_is_refused() -> None:
    options = {"functions": [f"{TOOLS}:python"], "builtin": ["python"], "sandbox_url": "http://h"}
    with pytest.raises(CouplerError, match=r"environment\.builtin has a tool python"):
        ToolEnvironment(ToolsConfig(**options))


@here
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_reward_runs_programs(mode: str) -> None:
    from coupler.rewards import Limits

    samples = [("print(6 * 7)", "42", {}), ("print(1)", "42", {}), ("1 / 0", "42", {})]
    scored = check_reward("played_tools:by_program", samples, 30.0, Limits(sandbox=mode))
    assert [found.result for found in scored] == [1.0, 0.0, 0.0]


@here
def test_a_reward_in_the_sandbox_is_told_that_it_runs_no_programs() -> None:
    from coupler.rewards import Invalid, Limits

    samples = [("print(6 * 7)", "42", {})]
    (scored,) = check_reward("played_tools:by_program", samples, 30.0, Limits(sandbox="require"))
    assert isinstance(scored.result, Invalid)
    assert "run this reward outside of it, with reward.sandbox=auto" in scored.detail


DOCTOR: dict[str, tuple[tuple[int, str] | None, Verdict, str]] = {
    "right": (None, Verdict.OK, "runs programs, each alone"),
    "wrong": (
        (200, json.dumps({"status": "Success", "run_result": {"status": "Finished"}})),
        Verdict.PROBLEM,
        "runs a program, and says ''",
    ),
    "broken": ((500, "no"), Verdict.PROBLEM, "answers 500: no"),
}


@here
@pytest.mark.parametrize("name", DOCTOR)
def test_the_doctor_tries_a_server(name: str) -> None:
    fixed, verdict, text = DOCTOR[name]
    with serving(fixed) as (url, _):
        (found,) = findings(ToolsConfig(builtin=["python"], sandbox_url=url))
    assert found.verdict is verdict and text in found.text


@here
@pytest.mark.parametrize("separate", [True, False])
def test_the_doctor_tries_the_sandbox(separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Sandbox.__init__
    monkeypatch.setattr(
        Sandbox, "__init__", lambda self, limits: make(self, limits, separate=separate)
    )
    (found,) = findings(ToolsConfig(builtin=["python"]))
    assert found.verdict is (Verdict.OK if separate else Verdict.WARNING)
    monkeypatch.setattr(sandbox, "why_no_bubblewrap", lambda: "bwrap is not installed")
    (found,) = findings(ToolsConfig(builtin=["python"]))
    assert found.verdict is Verdict.PROBLEM and "apt-get install bubblewrap" in found.fix
