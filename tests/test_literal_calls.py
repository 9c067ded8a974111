"""Tool calls that are written as a function with values: as LFM 2.5 and Gemma 4 do."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from test_conversations import KEEPS, folder, said, user

from coupler.conversation import Malformed, TemplateRenderer
from coupler.conversation.literals import Literals
from coupler.data import Codec
from coupler.errors import ConfigError
from coupler.interfaces import Model
from coupler.testing.conversations import TOOL, check_renderer

ONE = "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
ALL = (
    "{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}"
    + ONE
    + ("{% endfor %}")
)
# a list of calls, whose strings are in single quotes and whose lists are Python's
PYTHON = KEEPS.replace(
    ALL,
    "{% if m.tool_calls %}<|calls|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments | items %}{{ k }}="
    "{% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}{% else %}{{ v }}"
    "{% endif %}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
    "<|ends|>{% endif %}",
)
# strings between control tokens, and keys without quotes
VALUE = (
    "{% macro value(v) %}{% if v is none %}null{% elif v is string %}<|q|>{{ v }}<|q|>"
    "{% elif v is mapping %}{{ '{' }}{% for k, e in v | items %}{{ k }}:{{ value(e) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is iterable %}[{% for e in v %}"
    "{{ value(e) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}"
    "{% endmacro %}"
)
QUOTED = VALUE + KEEPS.replace(
    ALL,
    "{% for c in m.tool_calls or [] %}<|asks|>call:{{ c.function.name }}"
    "{{ value(c.function.arguments) }}<|ends|>{% endfor %}",
)
# it writes the text beside calls behind their results
MOVED = QUOTED.replace("{{ m.content }}{%", "{{ m.content if not m.tool_calls }}{%").replace(
    "<|im_end|>\n{% endif %}{% endfor %}{% if add",
    "<|im_end|>\n{% endif %}{% if m.role == 'tool' and (loop.last or loop.nextitem.role != 'tool')"
    " %}{% for c in messages if c.tool_calls %}{{ c.content }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add",
)


@pytest.fixture(scope="module")
def codec_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(
        lambda template: Codec(Model(str(folder(tmp_path_factory.mktemp("model"), template))))
    )


def python(*calls: tuple[str, str]) -> str:
    return f"<|calls|>[{', '.join(f'{name}({given})' for name, given in calls)}]<|ends|>"


def quoted(*calls: tuple[str, str]) -> str:
    return "".join(f"<|asks|>call:{name}{{{given}}}<|ends|>" for name, given in calls)


@pytest.mark.parametrize("template", [PYTHON, QUOTED, MOVED], ids=["python", "quoted", "moved"])
def test_such_a_template_is_exact(template: str, codec_of: Any) -> None:
    renderer = TemplateRenderer(codec_of(template), tools=True)
    assert renderer.text_beside_calls is (template != MOVED)
    assert check_renderer(renderer, tools=True) >= 50


@pytest.mark.parametrize(
    ("template", "text", "calls"),
    [
        (PYTHON, python(("look", "at='the \"door\"', far=3")),
         [("look", {"at": 'the "door"', "far": 3})]),
        (PYTHON, python(("look", 'at="it\'s", deep=[1, None, {"a": True}]')),
         [("look", {"at": "it's", "deep": [1, None, {"a": True}]})]),
        (PYTHON, "so\n" + python(("a", ""), ("b.c", "x=-1.5e3")),
         [("a", {}), ("b.c", {"x": -1500.0})]),
        (PYTHON, python(("look", r"at='a\nb\'\q\u00e9'")), [("look", {"at": "a\nb'\\q\u00e9"})]),
        (PYTHON, python(("look", r"at='\ud83d\ude42\ud800'")), [("look", {"at": "🙂\ufffd"})]),
        (PYTHON, "<|calls|> [look ( at = 'x' , n = {'k': [1,]} )] <|ends|>",
         [("look", {"at": "x", "n": {"k": [1]}})]),
        (QUOTED, quoted(("look", 'at:<|q|>the "}, {" door<|q|>')),
         [("look", {"at": 'the "}, {" door'})]),
        (QUOTED, quoted(("a", ""), ("b", "x:{y:[true,null,1.5],z-w:<|q|>\\n<|q|>}")),
         [("a", {}), ("b", {"x": {"y": [True, None, 1.5], "z-w": "\\n"}})]),
        (QUOTED, quoted(("look", '"at":"x"')), [("look", {"at": "x"})]),
    ],
)  # fmt: skip
def test_calls_are_read(template: str, text: str, calls: list[Any], codec_of: Any) -> None:
    codec = codec_of(template)
    renderer = TemplateRenderer(codec, tools=True)
    parsed = renderer.parse(said(codec, text), (), [TOOL])
    functions = [call["function"] for call in parsed.message.get("tool_calls", [])]
    before = "so" if text.startswith("so") else ""
    assert (parsed.malformed, parsed.message["content"]) == ("", before)
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
    assert "tool_calls" not in renderer.parse(said(codec, text), (), []).message


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PYTHON, "<|calls|>[look(at='x'"),
        (PYTHON, "<|calls|>[look(at='x)]<|ends|>"),
        (PYTHON, "<|calls|>[look(at='it's')]<|ends|>"),
        (PYTHON, "<|calls|>[look('x')]<|ends|>"),
        (PYTHON, "<|calls|>[look(at=__import__('os').getcwd())]<|ends|>"),
        (PYTHON, "<|calls|>[]<|ends|>"),
        (PYTHON, python(("look", "at='x'")) + " more"),
        (PYTHON, python(("look", f"at={'[' * 90}{']' * 90}"))),
        (PYTHON, python(("look", f"at={'[' * 5000}"))),
        (PYTHON, python(("look", f"at={'9' * 5000}"))),
        (QUOTED, "<|asks|>call:look{at:<|q|>x}<|ends|>"),
        (QUOTED, "<|asks|>call:look{at}<|ends|>"),
        (QUOTED, "<|asks|>look{at:1}<|ends|>"),
        (QUOTED, "<|asks|>call:look{at:1}"),
    ],
)
def test_what_is_no_call_is_malformed(template: str, text: str, codec_of: Any) -> None:
    codec = codec_of(template)
    renderer = TemplateRenderer(codec, tools=True)
    parsed = renderer.parse(said(codec, text), (), [TOOL])
    assert "tool_calls" not in parsed.message
    assert parsed.message["content"] == text
    assert parsed.malformed or text.startswith("<|asks|>look")


@pytest.mark.parametrize(("template", "write"), [(PYTHON, python), (QUOTED, quoted)])
def test_hostile_calls_take_no_time(template: str, write: Any, codec_of: Any) -> None:
    renderer = TemplateRenderer(codec_of(template), tools=True)
    assert renderer.calls
    start = time.monotonic()
    for piece in (
        "<|calls|>[",
        "<|asks|>call:",
        "'",
        "\\",
        "<|q|>",
        "[",
        "{a:",
        " ",
        ",",
        "9",
        "f(",
    ):
        for before in (
            "",
            write(("f", "at=[")),
            write(("f", ""))[:-9],
            write(("f", ""))[:-9] + "'",
        ):
            with suppress(Malformed):
                renderer.calls.read(before + piece * 20_000, [TOOL])
    assert time.monotonic() - start < 20


def test_a_text_that_the_template_moves_begins_a_new_row(codec_of: Any) -> None:
    codec = codec_of(MOVED)
    renderer = TemplateRenderer(codec, tools=True)
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    new = [{"role": "tool", "content": "red", "tool_call_id": "a", "name": "look"}]
    ids = (codec.end_of_turn,)

    for text, appended in (("", True), ("so", False)):
        asked = {"role": "assistant", "content": text, "tool_calls": [call]}
        found = renderer.extend([user("hi"), asked], ids, new, [TOOL])
        assert (found is not None) is appended


def test_a_template_that_cannot_be_read_back_is_refused(codec_of: Any) -> None:
    for wrong in (
        PYTHON.replace("{{ k }}=", "{{ k | upper }}="),
        PYTHON.replace("{% else %}{{ v }}{% endif %}", "{% else %}<{{ v }}>{% endif %}"),
    ):
        with pytest.raises(ConfigError, match=r"\(case: a tool call\)"):
            TemplateRenderer(codec_of(wrong), tools=True)


@pytest.mark.parametrize(
    "text", ["", "x", "nullish", "- 1", "'a", "[1 2]", "{1: 2}", "{'a' 1}", "[1,"]
)
def test_no_value_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Literals("").read(text, 0)
