"""What a template writes around new messages is remembered, and is what it renders."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from test_control_tokens import KINDS, TEMPLATES
from test_conversations import (
    DROPS,
    KEEPS,
    ONE_CALL,
    OPENS,
    PAIRED,
    PLAIN,
    TAGGED,
    codec_of,
    codec_of_kind,
    templates,
)

from coupler.conversation.chat_template import ChatTemplate, Unproved
from coupler.conversation.glue import GlueMemory, dummy
from coupler.conversation.reading import USER, call
from coupler.data import Codec
from coupler.errors import CouplerError
from coupler.testing.conversations import TOOL

__all__ = ["codec_of"]  # the fixture
TEXTS = (
    "what is a 1 + 2 ?", " a ", "x\n", "\n\nx", "", " ", "3", "é 中 \U0001f600", "a" * 700,
    "<|im_end|>", "</s> a <s>", " <|im_start|>user\n", "<|im_", "end|>", "<think>\nx</think>",
    "<tool_response>\nx\n</tool_response>", "{{ x }} {% y %} {0} %s", "coupler", "[INST] no",
    "none", "abc", "covid",
)  # fmt: skip
SAYS = "{{ m.content }}"


def reading(read: str) -> str:
    """A template that writes a text as ``read`` says."""
    return PLAIN.replace(SAYS, read)


# how templates may read a text, that of the question above all
KNOWN = {
    "as it is": SAYS,
    "a sum": "{{ 'a' + m.content + ('b' ~ m['content']) }}",
    "trimmed": "{{ m.content | trim }}",
    "stripped": "{{ m.content.strip() + m.content.lstrip('\\n') + m.content.rstrip('x ') }}",
    "trimmed twice": "{% set c = m.content | trim %}{{ c.strip('a') if c else 'nothing' }}",
    "if any": "{% if m.content %}{{ m.content }}{% else %}nothing{% endif %}",
    "if a text": "{{ m.content if m.content is string and m.content is not none }}",
    "starts": "{{ 'A' if m.content.startswith('a') }}{{ m.content }}",
    "starts or ends": "{{ 'A' if m.content.startswith(('a', ' ')) }}{{ m.content }}"
    "{{ 'B' if m.content.endswith('?') }}",
    "holds": "{{ 'A' if 'a' in m.content }}{{ m.content }}{{ 'B' if ' ' not in m.content }}",
    "equals": "{{ 'A' if m.content == '3' }}{{ m.content }}{{ 'B' if m.content != 'abc' }}",
    "one of": "{{ 'A' if m.content in ['3', 'abc'] }}{{ m.content }}",
    "joined": "{{ [m.content, 'x', m.content] | join(', ') }}{{ ' '.join([m.content]) }}",
    "a macro": "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(m.content) }}",
    "a block": "{% set c %}a{{ m.content }}b{% endset %}{{ c }}",
    "held": "{% set ns = namespace(c=m.content) %}{{ ns.c }}",
    "shown twice": "{{ m.content }}{{ m.content }}",
    "not shown": "{{ 'x' if m.role == 'user' else m.content }}",
    "last of all": "{{ (messages | last).content if loop.last else m.content }}",
    "mapped": "{{ (messages | map(attribute='content') | list)[loop.index0] }}",
}
UNKNOWN = {
    "upper": "{{ m.content | upper }}",
    "lower": "{{ m.content.lower() }}",
    "length": "{{ m.content | length }}{{ m.content }}",
    "letters": "{% for c in m.content %}{{ c }}.{% endfor %}",
    "slice": "{{ m.content[1:] }}",
    "letter": "{{ m.content[0] }}{{ m.content }}",
    "replaced": "{{ m.content | replace('a', 'b') }}",
    "replacing": "{{ 'abc'.replace('b', m.content) }}",
    "parts": "{{ m.content.split('a')[-1] }}",
    "splitting": "{{ 'abc 3'.split(m.content or 'x') | join('-') }}",
    "json": "{{ m.content | tojson }}",
    "json of all": "{{ m | tojson }}",
    "printed": "{{ m }}",
    "printed list": "{{ [m.content] }}",
    "percent": "{{ '%s' % m.content }}",
    "percents": "{{ 'a%s' % (m.content,) }}",
    "format": "{{ '{}'.format(m.content) }}",
    "formats": "{{ m.content.format(3) }}",
    "format filter": "{{ '%s' | format(m.content) }}",
    "in a text": "{{ 'A' if m.content in 'abc 3' }}{{ m.content }}",
    "test in a text": "{{ 'A' if m.content is in('abc 3') }}{{ m.content }}",
    "begins another": "{{ 'A' if 'abc'.startswith(m.content) }}{{ m.content }}",
    "counted": "{{ 'abc'.count(m.content) }}{{ m.content }}",
    "before": "{{ 'A' if m.content < 'b' }}{{ m.content }}",
    "after": "{{ 'A' if 'b' < m.content }}{{ m.content }}",
    "sorted": "{{ messages | map(attribute='content') | sort | join(' ') }}{{ m.content }}",
    "unique": "{{ messages | map(attribute='content') | unique | list | length }}{{ m.content }}",
    "a key": "{{ {'abc': 'A'}.get(m.content) }}{{ m.content }}",
    "a subscript": "{{ {'abc': 'A'}[m.content] }}{{ m.content }}",
    "a number": "{{ m.content | int }}{{ m.content }}",
    "a float": "{{ m.content | float }}{{ m.content }}",
    "is lower": "{{ 'A' if m.content is lower }}{{ m.content }}",
    "is sequence": "{{ 'A' if m.content is sequence }}{{ m.content }}",
    "escaped": "{{ m.content | e }}",
    "indented": "{{ m.content | indent }}",
    "times": "{{ m.content * 2 }}",
    "sum read": "{{ ('a' + m.content).strip() }}",
    "block read": "{% set c %} {{ m.content }}{% endset %}{{ c | trim }}",
    "sum holds": "{{ 'A' if 'ab' in 'a' + m.content }}{{ m.content }}",
    "trimmed by itself": "{{ 'abc'.strip(m.content) }}{{ m.content }}",
    "compared": "{{ 'A' if messages[0].content == m.content ~ '' }}{{ m.content }}",
    "random": "{{ [0, 0] | random }}{{ m.content }}",
}
RENDERED = (Unproved, CouplerError)


def memory_of(codec: Codec) -> GlueMemory:
    return GlueMemory(ChatTemplate(codec, codec.stop_ids(())))


def outcome(function: Any, *given: Any) -> Any:
    try:
        return function(*given)[:2]
    except RENDERED as error:
        return type(error)


def appended(random: Random, tools: bool) -> tuple[list[Any], list[Any]]:
    """Calls of an answer, and new messages behind it."""
    names = random.choices(("look", "see_3"), k=random.choice((0, 1, 1, 2)) if tools else 0)
    calls = [call(random.randrange(9), name=name) for name in names]
    new: list[dict[str, Any]] = []
    for each in calls:
        more = {"name": each["function"]["name"]} if random.random() < 0.5 else {}
        new.append({"role": "tool", "content": said(random), "tool_call_id": each["id"], **more})
    if not new or random.random() < 0.3:
        new.append({"role": "user", "content": said(random)})
    return calls, new


def said(random: Random) -> str:
    return random.choice((random.choice(TEXTS), " ".join(random.choices(TEXTS, k=2))))


def check(glue: GlueMemory, *, tools: bool, rounds: int = 60) -> None:
    """Compare with what is rendered each time."""
    random = Random(0)
    for _ in range(rounds):
        calls, new = appended(random, tools)
        offered = random.choice(([TOOL], [TOOL, {**TOOL, "more": [1, None]}])) if tools else []
        found = outcome(glue.after, calls, new, offered)
        answer = dummy(calls)
        expected = outcome(glue.template.after, [USER], answer, new, offered)
        assert found == expected, (calls, new)


@pytest.mark.parametrize(
    "template", [PLAIN, KEEPS, DROPS, OPENS, ONE_CALL, TAGGED, PAIRED, *templates()]
)
@pytest.mark.parametrize("tools", [False, True])
def test_every_template_appends_what_it_renders(template: str, tools: bool, codec_of: Any) -> None:
    check(memory_of(codec_of(template)), tools=tools)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_appends_the_same_ids(
    kind: str, template: str, tmp_path: Path
) -> None:
    check(memory_of(codec_of_kind(kind, template, tmp_path)), tools=False)


@pytest.mark.parametrize("read", KNOWN.values(), ids=KNOWN)
def test_what_is_known_of_a_template_is_rendered_once(read: str, codec_of: Any) -> None:
    glue = memory_of(codec_of(reading(read)))
    check(glue, tools=False, rounds=100)
    assert glue.known and not glue.refused


@pytest.mark.parametrize("read", UNKNOWN.values(), ids=UNKNOWN)
def test_a_template_that_reads_more_is_rendered_each_time(read: str, codec_of: Any) -> None:
    glue = memory_of(codec_of(reading(read)))
    check(glue, tools=False, rounds=100)
    assert not glue.known


def test_a_shape_is_rendered_once(codec_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    glue = memory_of(codec_of(PLAIN))
    glue.after([], [{"role": "user", "content": "one"}], [])
    monkeypatch.setattr(glue.template.codec, "render", None)
    stop, segments = glue.after([], [{"role": "user", "content": "two <|im_end|>"}], [])
    assert stop == glue.template.codec.end_of_turn
    assert "two <|im_end|>" in glue.template.decode([i for s in segments for i in s.ids])
