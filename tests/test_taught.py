"""Rows of supervised training are the full rendering of the tokenizer, with the turns
of the assistant as targets, or are refused.
"""

from __future__ import annotations

import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from test_control_tokens import SPECIAL, TEMPLATES, fallback_bpe, unigram
from test_conversations import (
    DROPS,
    KEEPS,
    ONE_CALL,
    OPENS,
    PAIRED,
    PLAIN,
    TAGGED,
    chat,
    folder,
    talk,
    templates,
    user,
)
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from coupler.batch.trajectory import Origin, Trajectory
from coupler.conversation.taught import Conversations
from coupler.data import Codec, Row, examples, load_rows, supervised
from coupler.data.columns import Columns
from coupler.data.options import DataConfig, Truncation
from coupler.errors import CouplerError, DataError
from coupler.interfaces import Model
from coupler.testing.conversations import TOOL

CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "é 中"}},
}
# as models of Mistral have them
MOVES = (
    "{% set at = messages | map(attribute='role') | list %}{% for m in messages %}{% if tools and "
    "m.role == 'user' and 'user' not in at[loop.index:] %}<|im_start|>system\n{% for t in tools %}"
    "{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
) + KEEPS.partition("{% for m in messages %}")[2]
LOSES = PLAIN.replace(
    "in messages %}", "in messages if m.role != 'system' or messages[-1].role == 'user' %}"
)
REFUSAL = re.compile(r"row 0 \(from 0\) of a.jsonl, a conversation: .+\n  try:  ", re.DOTALL)


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "look", "tool_call_id": CALL["id"]}


TALK = [user("what is 1 ?"), answer("the answer is 3 ."), user("go on <s>"), answer(" é 中 🙂")]
SYSTEM = [{"role": "system", "content": "be brief"}, *TALK]
THOUGHT = [
    user("first"),
    answer("one", reasoning_content="because of one"),
    user("second"),
    answer("two", reasoning_content="because of two"),
]
TWICE = [*THOUGHT[:2], user("second"), user("third"), *THOUGHT[3:]]
ASKED = [user("look"), answer("", tool_calls=[CALL]), result("rain"), answer("it rains")]


@pytest.fixture(scope="module")
def codec_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make the codec of a template, once."""
    return cache(
        lambda template: Codec(Model(str(folder(tmp_path_factory.mktemp("model"), template))))
    )


def taught(
    codec: Codec, messages: list[dict[str, Any]], tools: bool = False, **options: Any
) -> list[Trajectory]:
    """What a conversation trains."""
    config = DataConfig(source="a.jsonl", **options)
    row = Row(tuple(messages), "", 0, {"tools": [TOOL]} if tools else {})
    assert row.is_conversation
    return Conversations(codec, config)(row)


def ids_of(trajectory: Trajectory) -> tuple[int, ...]:
    return tuple(id for segment in trajectory.segments for id in segment.ids)


def targets(codec: Codec, *trajectories: Trajectory) -> list[str]:
    return [
        codec.tokenizer.decode(list(segment.ids), skip_special_tokens=False)
        for trajectory in trajectories
        for segment in trajectory.segments
        if segment.origin is Origin.TARGET
    ]


def rendering(codec: Codec, messages: list[dict[str, Any]], tools: bool = False) -> tuple[int, ...]:
    """The ids of the full rendering, as transformers makes them."""
    offered = [TOOL] if tools else None
    theirs = codec.tokenizer.apply_chat_template(messages, tools=offered, return_dict=False)
    return tuple(theirs)


# --- conversations ---


def test_every_turn_is_trained_with_its_end_and_without_its_generation_prompt(
    codec_of: Any,
) -> None:
    codec = codec_of(PLAIN)
    (whole,) = taught(codec, TALK, control_tokens=True)
    assert ids_of(whole) == rendering(codec, TALK)
    assert targets(codec, whole) == ["the answer is 3 .<|im_end|>", " é 中 🙂<|im_end|>"]

    (last,) = taught(codec, TALK, train_on="last", control_tokens=True)
    assert ids_of(last) == ids_of(whole)
    assert targets(codec, last) == [" é 中 🙂<|im_end|>"]

    plain = taught(codec, TALK)
    control = codec.tokenizer.convert_tokens_to_ids("<s>")
    assert control in ids_of(whole) and control not in ids_of(plain[0])


@pytest.mark.parametrize("messages", [TALK, SYSTEM, THOUGHT, ASKED], ids=len)
@pytest.mark.parametrize(
    "template", [PLAIN, KEEPS, DROPS, OPENS, ONE_CALL, TAGGED, PAIRED, *templates()]
)
def test_rows_of_every_template_are_its_renderings_or_refused(
    template: str, messages: list[dict[str, Any]], codec_of: Any
) -> None:
    codec, tools = codec_of(template), messages is ASKED
    whole = [messages[: k + 1] for k, said in enumerate(messages) if said["role"] == "assistant"]
    rows, refusal = list[Trajectory](), ""
    try:
        rows = taught(codec, messages, tools, keep_reasoning=False, control_tokens=True)
    except CouplerError as error:
        refusal = str(error)
    if refusal:
        assert REFUSAL.match(refusal)
        assert template not in (KEEPS, DROPS) and (template != PLAIN or tools)
        return

    renderings = [rendering(codec, part, tools) for part in whole]
    assert all(ids_of(row) in renderings for row in rows)
    spoken = targets(codec, *rows)
    assert len(spoken) == len(whole), "each turn is trained once"
    stops = tuple(codec.tokenizer.decode([stop]) for stop in codec.stop_ids(()))
    for text in spoken:
        assert text.endswith(stops)
    for said in (m for m in messages if m["role"] == "assistant"):
        assert any(said["content"].strip() in text for text in spoken)


def test_a_turn_has_what_stood_before_it_when_it_was_said(codec_of: Any) -> None:
    """A template may show tools in front of the last question alone."""
    codec, messages = codec_of(MOVES), [*ASKED, user("and now ?"), answer("sun")]
    (kept,) = taught(codec, messages, tools=True)
    shown, *_ = (segment for segment in kept.segments if segment.origin is Origin.PROMPT)
    assert shown.ids == codec.prompt_ids(tuple(messages[:1]), "", tools=[TOOL])
    assert len(targets(codec, kept)) == 3

    rows = taught(codec, messages, tools=True, keep_reasoning=False)
    whole = [rendering(codec, part, tools=True) for part in (messages, ASKED[:2], ASKED)]
    assert [ids_of(row) for row in rows] == whole
    assert [len(targets(codec, row)) for row in rows] == [1, 1, 1]


def test_earlier_reasoning_stays_or_its_turn_is_a_row_of_its_own(codec_of: Any) -> None:
    codec = codec_of(DROPS)
    first, second = (
        f"<think>\nbecause of {text}\n</think>\n\n{text}<|im_end|>" for text in ("one", "two")
    )
    conversation, rollout = talk(
        codec, *(text.removesuffix("<|im_end|>") for text in (first, second))
    )
    told = chat(conversation, THOUGHT[:1]).message
    chat(conversation, [THOUGHT[0], told, THOUGHT[2]])
    (recorded,) = conversation.close()

    (kept,) = taught(codec, THOUGHT)
    assert ids_of(kept) == ids_of(recorded.trajectory), "what an episode records"
    assert targets(codec, kept) == [first, second]
    (kept,) = taught(codec, THOUGHT, train_on="last")
    assert ids_of(kept) == ids_of(recorded.trajectory) and targets(codec, kept) == [second]

    last, alone = taught(codec, THOUGHT, keep_reasoning=False)
    assert ids_of(last) == rendering(codec, THOUGHT) and targets(codec, last) == [second]
    assert ids_of(alone) == rendering(codec, THOUGHT[:2]) and targets(codec, alone) == [first]
    assert len(rollout.requests) == 2


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (PLAIN, TALK[1:], "it begins with a message of the assistant, which answers nothing"),
        (PLAIN.replace("<|im_end|>", ""), TALK, "none of the tokens that end a turn"),
        (OPENS, TALK, "is not shown behind the generation prompt"),
        (PLAIN.replace("m.content", "''"), TALK, "is not shown behind the generation prompt"),
        (PLAIN, [user("x"), answer("")], "is not shown behind the generation prompt"),
        (DROPS, TWICE, "writes turn 1 (from 0) otherwise once others follow"),
        (LOSES, SYSTEM, "stands behind another text than the policy is shown before it"),
    ],
)
def test_a_template_that_does_not_show_its_turns_is_refused(
    template: str, messages: list[dict[str, Any]], text: str, codec_of: Any
) -> None:
    with pytest.raises(DataError) as refused:
        taught(codec_of(template), messages)
    assert REFUSAL.match(str(refused.value)) and text in str(refused.value)


def test_reasoning_that_no_rendering_shows_is_counted(codec_of: Any) -> None:
    converse = Conversations(codec_of(PLAIN), DataConfig(source="a.jsonl"))
    converse(Row(tuple(THOUGHT), "", 0, {}))
    converse(Row(tuple(TALK), "", 0, {}))
    assert converse.unshown == 2


def test_a_column_of_messages_stands_for_a_prompt_and_an_answer(tmp_path: Path) -> None:
    def loaded(*records: dict[str, Any], **options: Any) -> list[Row]:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        config = DataConfig(source=str(tmp_path / "a.jsonl"), **options)
        return load_rows(config, columns=partial(Columns, conversations=True))

    told, plain = loaded(
        {"messages": TALK, "weight": 2, "tools": [TOOL]},
        {"messages": TALK, "prompt": "x", "answer": "y"},
    )
    assert told.prompt == tuple(TALK) and told.is_conversation and told.tools == (TOOL,)
    assert told.extra == {"weight": 2, "tools": [TOOL]}
    assert (plain.prompt, plain.answer, plain.is_conversation) == ("x", "y", False)

    for options in ({"prompt_key": "said"}, {"columns": {"messages": "said"}}):
        assert loaded({"said": TALK}, **options)[0].is_conversation
    with pytest.raises(DataError, match="each message needs a role and a content"):
        loaded({"messages": [{"from": "human", "value": "x"}]})
    with pytest.raises(DataError, match="no 'prompt'"):
        loaded({"messages": "x"})


# --- tokenizers that mark the beginnings of words ---


def marking(path: Path, made: Tokenizer, template: str | None) -> Codec:
    """The codec of a tokenizer that writes ``▁`` where a word begins."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    fast.chat_template = template
    fast.save_pretrained(path)
    return Codec(Model(str(path)))


@pytest.mark.parametrize("make", [lambda: fallback_bpe("always"), fallback_bpe, unigram])
@pytest.mark.parametrize("template", [None, TEMPLATES["chatml"], TEMPLATES["bos"]])
def test_the_first_word_of_an_answer_is_that_of_the_full_rendering(
    make: Any, template: str | None, tmp_path: Path
) -> None:
    codec, question, said = marking(tmp_path, make(), template), "what is 1 + 2 ?", "the answer"
    (row,), _ = supervised([Row(question, said, 0, {})], codec, DataConfig(source="a.jsonl"))

    ids = ids_of(row)
    if template is None:
        assert ids[:-1] == tuple(codec.tokenizer.encode(f"{question}{said}"))
    else:
        asked = codec.tokenizer.apply_chat_template(
            [user(question)], add_generation_prompt=True, tokenize=False
        )
        assert ids[:-1] == tuple(codec.tokenizer.encode(asked + said, add_special_tokens=False))
    assert ids[: len(row.segments[0].ids)] == codec.prompt_ids(question, "")
    assert ids[-1] == codec.end_of_turn
    assert codec.tokenizer.decode(row.segments[1].ids[0]) in ("t", "the", "th")

    if template is not None:
        messages = [user(question), answer(said), user("x"), answer("a user")]
        (told,) = taught(codec, messages)
        assert ids_of(told) == rendering(codec, messages)
        for text, expected in zip(targets(codec, told), ("the answer", "a user"), strict=True):
            assert text.partition("<")[0].rstrip() == expected


def test_a_token_across_the_end_of_a_prompt_is_of_the_answer(codec_of: Any) -> None:
    codec = codec_of(PLAIN)
    codec = Codec(Model(str(codec.folder)))
    codec.tokenizer.chat_template = None
    (row,), _ = supervised([Row("the answe", "r is", 0, {})], codec, DataConfig(source="a.jsonl"))
    ids = tuple(codec.tokenizer.encode("the answer is"))
    prompt, target = row.segments
    assert ids_of(row) == (*ids, codec.end_of_turn) and prompt.ids == ids[: len(prompt.ids)]
    assert codec.tokenizer.decode(list(prompt.ids)) == "the"
    assert codec.tokenizer.decode(list(target.ids[:-1])) == " answer is"


# --- lengths and weights ---


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("left", ["<|im_end|>", " é 中 🙂<|im_end|>"]),
        ("right", ["the answer is 3 .<|im_end|>"]),
        ("middle", [" é 中 🙂<|im_end|>"]),
    ],
)
def test_a_long_row_loses_the_part_that_is_asked_for(
    how: str, texts: list[str], codec_of: Any
) -> None:
    codec = codec_of(PLAIN)
    (whole,) = taught(codec, TALK)
    size = len(whole) - (len(whole.segments[0].ids) + len(whole.segments[1].ids)) + 2
    config = DataConfig(source="a.jsonl", max_tokens=size, truncation=Truncation(how))
    rows = [Row(tuple(TALK), "", 0, {})]
    (kept,), dropped = examples(rows, codec, config, converse=Conversations(codec, config))

    ids, whole_ids = ids_of(kept.trajectory), ids_of(whole)
    head = {"left": 0, "right": size, "middle": size - size // 2}[how]
    assert ids == whole_ids[:head] + whole_ids[len(whole_ids) - (size - head) :]
    assert (len(ids), dropped) == (size, 0) and kept.trajectory.segments[0].origin is Origin.PROMPT
    assert targets(codec, kept.trajectory)[-1:] == texts[-1:]


def test_rows_without_a_token_to_imitate_are_dropped(codec_of: Any) -> None:
    codec = codec_of(PLAIN)
    rows = [Row("x " * 99, "yes", 0, {}), Row("x", "yes", 1, {})]
    config = DataConfig(source="a.jsonl", max_tokens=40, truncation=Truncation.RIGHT)
    kept, dropped = examples(rows, codec, config)
    assert ([example.row.index for example in kept], dropped) == ([1], 1)
    with pytest.raises(DataError, match="leaves no token of an answer in 40 tokens"):
        examples(rows[:1], codec, config)


def test_rows_above_the_limit_are_refused_or_dropped(codec_of: Any) -> None:
    codec = codec_of(PLAIN)
    rows = [Row("x", "yes " * 9, 0, {}), Row("x", "yes", 1, {})]
    config = DataConfig(source="a.jsonl", max_tokens=30)
    with pytest.raises(
        DataError, match=r"1 of 2 rows are longer than data.max_tokens=30; .+ row 0"
    ):
        examples(rows, codec, config)
    config.truncation = Truncation.DROP
    kept, dropped = examples(rows, codec, config)
    assert ([example.row.index for example in kept], dropped) == ([1], 1)
    with pytest.raises(ValueError, match="drop_overlong=true contradicts truncation=left"):
        DataConfig(drop_overlong=True, truncation=Truncation.LEFT)


@pytest.mark.parametrize("weight", [-1, True, "2", float("inf"), [1]])
def test_a_weight_that_is_no_finite_number_from_0_on_is_refused(weight: Any, codec_of: Any) -> None:
    with pytest.raises(DataError, match=r"row 3 .+ has weight=.+; it multiplies the loss"):
        examples([Row("x", "y", 3, {"weight": weight})], codec_of(PLAIN), DataConfig(source="a"))
