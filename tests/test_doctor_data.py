"""``coupler doctor data``: each fault of rows is found, with its number and place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coupler.cli import main

GOOD = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(4)]
REWARD = "def score(completion, answer):\n    return float(completion == answer)\n"
Findings = Callable[..., list[dict[str, str]]]


@pytest.fixture
def findings(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Findings:
    """Examine rows; the exit code is 2 where a problem was found, and else 0."""

    def run(rows: list[Any], *overrides: str, scored: bool = False) -> list[dict[str, str]]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        reward = tmp_path / "reward.py"
        reward.write_text(REWARD)
        more = [f"reward.target={reward}:score"] if scored else []

        source = [f"model.path={model}", f"data.source={path}"]
        code = main(["doctor", "data", "--json", *source, *more, *overrides])
        found = json.loads(capsys.readouterr().out)
        assert code == (2 if any(f["verdict"] == "problem" for f in found) else 0)
        return found

    return run


def of(found: list[dict[str, str]], verdict: str) -> list[str]:
    return [f["text"] + f["fix"] for f in found if f["verdict"] == verdict]


def test_good_rows_are_described(findings: Findings) -> None:
    found = findings(GOOD, scored=True)
    assert not of(found, "problem") and not of(found, "warning")
    texts = "\n".join(of(found, "ok"))
    assert "4 of 4 rows of" in texts and "columns: prompt text; answer text" in texts
    assert "prompts have 24 to 24 tokens, median 24, p99 24" in texts
    assert "gives 1 or more for 4 rows' own answers" in texts


@pytest.mark.parametrize(
    ("rows", "overrides", "said"),
    [
        (
            [{"question": "a", "answer": "b"}] * 2,
            (),
            "2 of 6 rows; the first: {path}, line 5 has no 'prompt'. it has:  question, answer"
            "data.prompt_key=question",
        ),
        (
            [{"prompt": " ", "answer": "b"}],
            (),
            "1 of 5 rows; the first: {path}, line 5: 'prompt' is",
        ),
        ([{"prompt": "a"}], (), "1 of 5 rows; the first: {path}, line 5 has no 'answer'"),
        ([7], (), "1 of 5 rows; the first: {path}, line 5 is a int, not a mapping"),
        (
            [{"prompt": "a " * 200, "answer": "b"}],
            ("data.max_prompt_tokens=64",),
            "1 of 5 prompts are longer than 64 tokens; the first is {path}, line 5 with ",
        ),
        (
            [{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}],
            ("data.columns.tools_kwargs=tool_kwargs",),
            "no row has 'tool_kwargs'.",
        ),
        (
            [{"prompt": [{"role": "system", "content": "a"}], "answer": "b"}] * 3,
            ("data.system_prompt=be brief",),
            "3 of 7 rows; the first: {path}, line 5: it has a system message of its own.",
        ),
        ([], ("data.sampler=no.py:Mine",), "data.sampler=no.py:Mine cannot be used"),
        (
            [],
            ("algorithm=sft", "data.sampler=coupler.data.curriculum:ByRewards"),
            "has no 'ByRewards'",
        ),
        (
            [],
            ("data.sampler=coupler.data.curriculum:ByReward", "data.sampler_args={low: 2}"),
            "data.sampler_args: low=2 must be below high=1.0",
        ),
        ([{"prompt": "a", "answer": ""}], ("algorithm=sft",), "has an empty answer: there is"),
        (
            [{"messages": [{"role": "assistant", "content": "a"}]}],
            ("algorithm=sft",),
            "a conversation: it begins with a message of the assistant",
        ),
    ],
)
def test_what_a_run_would_refuse_is_a_problem(
    rows: list[Any], overrides: tuple[str, ...], said: str, findings: Findings, tmp_path: Path
) -> None:
    problems = of(findings([*GOOD, *rows], *overrides), "problem")
    assert len(problems) == 1, problems
    assert said.format(path=tmp_path / "rows.jsonl") in problems[0]


SCHEMA = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tool_kwargs": {"f": {}}}, "no row has 'tools_kwargs', and 'tool_kwargs' may be meant"),
        ({"tools": {"f": {"create_kwargs": {}}}}, "arguments of tools under 'tools'"),
        ({"tools_kwargs": [SCHEMA]}, "schemas under 'tools_kwargs'"),
        ({"tools_kwargs": {"f": 3}}, "'tools_kwargs' that map no tools to arguments"),
        ({"extra_info": {"tools_kwargs": {"f": {}}}}, "'tools_kwargs' inside extra_info"),
        ({"extra_info": {"need_tools_kwargs": True}}, "'need_tools_kwargs' without any"),
        ({"answer": 3}, "answers that are no text but integer: 1 of 5 rows"),
        ({"answer": "wrong <|im_end|>"}, "texts of control tokens, encoded as plain characters"),
        ({"prompt": GOOD[1]["prompt"]}, "prompts that came before: 1 of 5 rows"),
        ({"prompt": [{"role": "robot", "content": "a"}]}, "a role 'robot', which is none of"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "prompts that end with a message of the assistant",
        ),
        ({"prompt": [{"role": "user", "content": "a"}] * 2}, "two messages of the user in a row"),
        (
            {"prompt": [{"role": r, "content": r} for r in ("user", "system", "user")]},
            "system messages that are not the first",
        ),
        ({"tools": "[]"}, "'tools' as text"),
        ({"tools": [SCHEMA]}, "tools, of which the chat template knows none"),
    ],
)
def test_what_looks_wrong_is_a_warning(
    row: dict[str, Any], said: str, findings: Findings, tmp_path: Path
) -> None:
    warnings = of(findings([*GOOD, {"prompt": "odd", "answer": "x", **row}]), "warning")
    (warning,) = [text for text in warnings if said in text]
    assert f"{tmp_path / 'rows.jsonl'}, line 5" in warning or "(1 rows)" in warning


def test_a_message_that_the_template_leaves_out_is_found(
    model: Path, findings: Findings, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    template = (
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    (copy / "chat_template.jinja").write_text(template)
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    found = findings([*GOOD, {"prompt": prompt, "answer": "b"}], f"model.path={copy}")
    (lost,) = of(found, "warning")
    assert "messages that the chat template leaves out (1 of 2 are shown): 1 of 5 rows" in lost


def test_a_mapped_column_is_no_fault(findings: Findings) -> None:
    rows = [{**row, "extra_info": {"tools_kwargs": {"f": {}}}} for row in GOOD]
    found = findings(rows, "data.columns.tools_kwargs=extra_info.tools_kwargs")
    assert not of(found, "warning")


def test_a_mapping_to_a_name_that_nothing_knows_is_found(findings: Findings) -> None:
    rows = [{**row, "kw": {"f": {}}} for row in GOOD]
    (said,) = of(findings(rows, "data.columns.tool_kwargs=kw"), "warning")
    assert "data.columns.tools_kwargs may be meant" in said


def test_held_out_prompts_and_own_answers_are_compared(findings: Findings, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps(GOOD[2]) + "\n")
    found = findings(GOOD, f"eval.data.source={tmp_path}/held.jsonl")
    (shared,) = of(found, "warning")
    assert "prompts that data has, too: 1 of 1 rows" in shared and "rows.jsonl, line 3" in shared

    (tmp_path / "strict.py").write_text(
        "def score(completion, answer):\n    return answer != '4'\n"
    )
    found = findings(GOOD, f"reward.target={tmp_path}/strict.py:score")
    (low,) = of(found, "warning")
    assert "own answers that get a reward below 1: 1 of 4 rows" in low and "line 3: it is 0" in low


def test_overlong_rows_that_are_dropped_refuse_nothing(findings: Findings) -> None:
    rows = [*GOOD, {"prompt": "a " * 200, "answer": "b"}]
    found = findings(rows, "data.max_prompt_tokens=64", "data.drop_overlong=true")
    assert "they are left out" in of(found, "warning")[0]


def test_without_a_model_or_rows_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "data"]) == 2
    assert "data.source is not set" in capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD[0]))
    assert main(["doctor", "data", f"data.source={tmp_path}/rows.jsonl"]) == 2
    assert "model.path is not set: lengths" in capsys.readouterr().out
    assert main(["doctor", "data", f"data.source={tmp_path}/no.jsonl"]) == 2
    assert "there is no file" in capsys.readouterr().out


def test_conversations_of_supervised_training_are_encoded(findings: Findings) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    thought = [messages[0], {**messages[1], "reasoning_content": "because"}]
    rows = [{"messages": messages}, {"messages": thought}]
    found = findings(rows, "algorithm=sft")
    texts = [finding["text"] for finding in found]
    assert any(text.startswith("2 examples of ") and " tokens train " in text for text in texts)
    assert any("shows no reasoning of 1 answers" in text for text in texts)
