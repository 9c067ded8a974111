"""Turns in channels, as those of gpt-oss: over a template of this folder, and over
those of gpt-oss that installed packages ship. The tokenizer is made here.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from job_run import metrics
from test_conversations import DROPS, KEEPS, PLAIN, folder, user
from tests.faults import toy_runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coupler.batch.trajectory import Origin
from coupler.conversation import Conversation, Limits, Malformed, TemplateRenderer
from coupler.conversation.bridge import Case
from coupler.data import Codec
from coupler.errors import ConfigError
from coupler.interfaces import Model, Request
from coupler.testing.conversations import (
    TOOL,
    Scripted,
    check_recording,
    check_renderer,
    check_rows,
)
from coupler.testing.models import read_tensors, rewrite

OWN = Path(__file__).with_name("harmony.jinja").read_text()
SHIPPED = {
    f"{file.parts[-3]}/{file.name}": file.read_text()
    for root in {Path(path) for path in sys.path if path}
    for file in sorted(root.glob("*/chat_templates/gptoss*.jinja"))
}
SPECIAL = [
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
    "<|end|>", "<|message|>", "<|call|>", "<|reserved|>",
]  # fmt: skip
STOPS = ("<|return|>", "<|endoftext|>", "<|call|>")

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def asks(arguments: str = '{"at": "a"}', name: str = "look") -> str:
    """Write a tool call as the template does."""
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"


def samples(arguments: str = '{"at": "a"}', to: str = "functions.look") -> str:
    """Write a tool call as the policy does."""
    header = f"<|channel|>commentary to={to} <|constrain|>json<|message|>"
    return f"{header}{arguments}<|call|>"


def write(path: Path, template: str, stops: tuple[str, ...] = STOPS) -> Path:
    """Write a tokenizer of bytes with the control tokens of gpt-oss."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["assistant analysis commentary final to=functions."] * 10, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|startoftext|>",
        eos_token="<|return|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = template
    fast.save_pretrained(path)

    ids = [fast.convert_tokens_to_ids(stop) for stop in stops]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return path


@pytest.fixture(scope="module", params=[OWN, *SHIPPED.values()], ids=["own", *SHIPPED])
def codec(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec(Model(str(write(tmp_path_factory.mktemp("model"), request.param))))


@pytest.fixture(scope="module")
def renderer(codec: Codec) -> TemplateRenderer:
    return TemplateRenderer(codec, tools=True)


def said(codec: Codec, text: str) -> tuple[int, ...]:
    return codec.encode([(text, False)])


def letters(codec: Codec, text: str) -> tuple[int, ...]:
    """Encode a text whose control tokens are only spelled."""
    return codec.encode([(text, True)])


def talk(codec: Codec, renderer: TemplateRenderer, *turns: str) -> tuple[Conversation, Scripted]:
    left = [said(codec, turn) for turn in turns]
    rollout = Scripted(lambda _: left.pop(0))
    return Conversation(rollout, renderer, Limits(512), Request((), 1, seed=5)), rollout


def play(conversation: Conversation, *new: str) -> list[Any]:
    """Ask in turn what is given, and return the history. A call is answered by it."""
    history: list[Any] = []
    for text in new:
        calls = history[-1].get("tool_calls", []) if history else []
        history += [
            {"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls
        ] or [user(text)]
        history.append(asyncio.run(conversation.chat(history, [TOOL])).message)
    return history


# --- ids ---


def test_a_template_with_channels_is_taken(renderer: TemplateRenderer, codec: Codec) -> None:
    assert renderer.proved == {Case.TOOL, Case.TOOL_AND_USER}
    assert renderer.other_end == "<|end|>"
    assert len(str(renderer).splitlines()) == 1
    assert "each question behind an answer begins a new row" in str(renderer)
    # histories with one call x texts x (result, result and question)
    assert check_renderer(renderer, tools=True) == 3 * 5 * 2
    assert check_renderer(TemplateRenderer(codec)) == 0


def test_calls_in_a_row_and_their_answer_are_one_row(
    renderer: TemplateRenderer, codec: Codec
) -> None:
    turns = (
        f"{ANALYSIS}one{NEXT}{asks()}",
        f"{ANALYSIS}two{NEXT}" + asks('{"at": "b"}'),
        f"{ANALYSIS}three{NEXT}{FINAL}it is red<|return|>",
    )
    conversation, rollout = talk(codec, renderer, *turns)
    history = play(conversation, "what is there?", "a door", "<|end|> red")
    for turn, end in enumerate((1, 3, 5)):
        expected = renderer.render(history[:end], [TOOL])
        assert rollout.requests[turn].prompt == expected
    assert [m.get("reasoning_content") for m in history[1::2]] == ["one", "two", "three"]
    assert history[-1]["content"] == "it is red"

    (row,) = conversation.close()
    assert not conversation.forks
    check_rows([row], rollout.answered)
    segments = row.trajectory.segments
    assert sum(s.origin is Origin.SAMPLED for s in segments) == 3
    shown = [codec.decode(s.ids) for s in segments if s.origin is Origin.OBSERVATION]
    assert [text for text in shown if "door" in text or "red" in text] == [
        '"a door"',
        '"<|end|> red"',
    ]


@pytest.mark.parametrize("keep_reasoning", [True, False])
def test_a_second_question_is_a_row_that_the_template_would_write(
    keep_reasoning: bool, codec: Codec
) -> None:
    renderer = TemplateRenderer(codec, tools=True, keep_reasoning=keep_reasoning)
    turns = (
        f"{ANALYSIS}one{NEXT}{samples()}",
        f"{ANALYSIS}two{NEXT}{FINAL}red<|return|>",
        f"{ANALYSIS}three{NEXT}{asks()}",
        f"{FINAL}blue<|return|>",
    )
    conversation, rollout = talk(codec, renderer, *turns)
    history = play(conversation, "what is there?", "a door", "and now?", "a wall")
    rows = conversation.close()
    check_rows(rows, rollout.answered)
    assert [len(row.trained) for row in rows] == [2, 2]
    assert conversation.forks == ["the renderer cannot extend this turn with these messages"]

    for turn, end in ((2, 5), (3, 7)):
        assert rollout.requests[turn].prompt == renderer.render(history[:end], [TOOL])
    fed = [codec.tokenizer.decode(request.prompt) for request in rollout.requests]
    kept = [[thought in text for thought in ("one", "two", "three")] for text in fed]
    assert kept == [[False] * 3, [True, False, False], [False] * 3, [False, False, True]]
    assert f"{FINAL}red<|end|><|start|>user<|message|>and now?<|end|>" in fed[2]


def test_a_row_that_begins_is_what_transformers_renders(
    renderer: TemplateRenderer, codec: Codec
) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "<b>"}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "one"}
    result, answer = {"role": "tool", "content": "a door"}, {"role": "assistant", "content": "3"}
    for history in (
        [user("hi")],
        [user("hi"), asked, result],
        [user("hi"), asked, result, asked, result, user("so?")],
        [user("hi"), asked, result, {**answer, "thinking": "two"}, user("so?"), asked, result],
        [{"role": "system", "content": "be brief"}, user("hi"), answer, user("so?")],
    ):
        text = codec.tokenizer.apply_chat_template(
            history, tools=[TOOL], add_generation_prompt=True, tokenize=False
        )
        theirs = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
        ours = [{**m, "reasoning_content": m.pop("thinking", "")} for m in map(dict, history)]
        assert renderer.render(ours, [TOOL]) == tuple(theirs)


def test_a_preamble_stays_where_it_was_sampled(renderer: TemplateRenderer, codec: Codec) -> None:
    preamble = f"{ANALYSIS}one{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{samples()}"
    conversation, rollout = talk(codec, renderer, preamble, f"{FINAL}red<|return|>", "x<|return|>")
    history = play(conversation, "what is there?", "a door", "and now?")
    assert history[1]["content"] == "I look."
    assert preamble in codec.tokenizer.decode(rollout.requests[1].prompt)
    check_rows(conversation.close(), rollout.answered)
    # the template refuses a text and reasoning beside a call
    fed = codec.tokenizer.decode(renderer.render(history[:3], [TOOL]))
    assert f"{ANALYSIS}I look.<|end|>" in fed and "one" not in fed


def turn_of(random: Random) -> str:
    """Return what a policy may say: as it should, with errors, or cut."""
    thought = random.choice(("", f"{ANALYSIS}hm{NEXT}", f"{ANALYSIS}a{NEXT}{ANALYSIS}é 中{NEXT}"))
    preamble = random.choice(("", "", f"<|channel|>commentary<|message|>so{NEXT}"))
    ends = (f"{FINAL}3", f"{FINAL} x \n", FINAL, asks(), samples('{"far": [1.5, null], "at": "b"}'))
    wrong = (samples('{"at'), samples(to="python"), asks() + "3", "3", "<|start|>", ANALYSIS)
    text = thought + preamble + random.choice((*ends, *ends, *wrong))
    stop = random.choice(STOPS if random.random() < 0.2 else ("<|return|>",))
    return text if text.endswith("<|call|>") else text + stop


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("seed", range(16))
def test_random_conversations(codec: Codec, seed: int, tools: bool) -> None:
    renderer = TemplateRenderer(codec, tools=tools, keep_reasoning=bool(seed % 2))

    def says(random: Random) -> tuple[int, ...]:
        ids = said(codec, turn_of(random))
        split = tuple(i for c in "an answer" for i in said(codec, c))
        return random.choice((ids, ids, (*split, *ids), (*ids[:-1], 280, 5, 281, ids[-1])))

    conversation = asyncio.run(check_recording(renderer, says, seed, tools=tools))
    counts = {name.split("/")[1]: m.value for name, m in conversation.metrics().items()}
    assert counts["rows"] == counts["forks"] + 1 or not counts["turns"]


# --- reading ---


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{FINAL}3<|return|>", "", "3", []),
        (f"{ANALYSIS}hm{NEXT}{FINAL}3\n<|return|>", "hm", "3\n", []),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}3<|return|>", "a\nb", "3", []),
        (f"{FINAL[:-11]} <|constrain|>json<|message|>{{}}<|return|>", "", "{}", []),
        (f"<|channel|>commentary<|message|>I see.{NEXT}{FINAL}3<|return|>", "", "I see.\n3", []),
        ("hello<|return|>", "", "hello", []),
        ("<|return|>", "", "", []),
        (f"{ANALYSIS}hm", "hm", "", []),
        (f"{ANALYSIS}hm<|end|><|return|>", "hm", "", []),
        (f"{ANALYSIS}hm{NEXT}{FINAL}3 and", "hm", "3 and", []),
        (asks(), "", "", [("look", {"at": "a"})]),
        (samples(), "", "", [("look", {"at": "a"})]),
        (samples().replace(" <|constrain|>json", ""), "", "", [("look", {"at": "a"})]),
        (samples().replace(" <|constrain|>", "<|constrain|>"), "", "", [("look", {"at": "a"})]),
        (samples().replace("<|constrain|>", ""), "", "", [("look", {"at": "a"})]),
        (samples().replace("commentary", "analysis"), "", "", [("look", {"at": "a"})]),
        (asks(' {"at":\n"a", "n": {"k": [1, null]}}\n'), "", "",
         [("look", {"at": "a", "n": {"k": [1, None]}})]),
        (asks("{}", "no.such-tool"), "", "", [("no.such-tool", {})]),
        (f"{ANALYSIS}hm{NEXT}{asks()}", "hm", "", [("look", {"at": "a"})]),
        (f"{ANALYSIS}hm{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{samples()}",
         "hm", "I look.", [("look", {"at": "a"})]),
        (f"<|channel|>commentary<|message|>I look.{NEXT}{ANALYSIS}hm{NEXT}{asks()}",
         "hm", "I look.", [("look", {"at": "a"})]),
        (samples().replace("<|call|>", "<|return|>"), "", "", [("look", {"at": "a"})]),
    ],
)  # fmt: skip
def test_messages_of_a_turn_are_read(
    text: str, reasoning: str, content: str, calls: Any, codec: Codec, renderer: TemplateRenderer
) -> None:
    parsed = renderer.parse(said(codec, text), (), [TOOL])
    message = parsed.message
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert (parsed.malformed, message.get("reasoning_content", "")) == ("", reasoning)
    assert message["content"] == content and type(message["content"]) is str
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
    assert "tool_calls" not in renderer.parse(said(codec, text), (), []).message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (samples(to="python"), "goes to 'python', and not to functions.NAME"),
        (samples(to="functions."), "goes to 'functions.', and not to"),
        (samples(to="functions.a(b)"), "goes to 'functions.a(b)', and not"),
        (samples(to="functions.look to=functions.look"), "a header that cannot be read"),
        (samples('{"at": "the do'), "is no JSON"),
        (samples(""), "is no JSON"),
        (samples("[1]"), "are no object"),
        (samples('{"a":' * 90 + "1" + "}" * 90), "nest too deeply"),
        (samples("[" * 20_000), "is no JSON"),
        (samples('{"at": "<|reserved|>"}'), "holds a control token: '<|reserved|>"),
        (samples('{"at": "<|start|>"}'), "holds a control token: '<|start|>"),
        (samples('{"at": "<|end|>"}'), "does not begin after the end of another one: '\"}'"),
        (samples()[:-8] + f"{NEXT}{samples()}", "a turn has 2 tool calls, and may have one"),
        (samples()[:-8] + f"{NEXT}{FINAL}3<|return|>", "the text '3' follows a tool call"),
        (samples()[:-8] + "<|end|>3<|return|>", "does not begin after the end"),
        ("<|channel|>commentary to=functions.lo", "no header with a channel: '<|channel|>comm"),
        ("<|channel|>ana<|return|>", "no header with a channel"),
        (f"{ANALYSIS}hm<|end|><|start|><|return|>", "no header with a channel: '<|start|>'"),
        (f"{ANALYSIS}hm{NEXT}<|return|>", "no header with a channel: '<|start|>assistant'"),
        (f"{ANALYSIS}hm<|start|>assistant{samples()}", "holds a control token: '<|start|>"),
        ("<|message|>3<|return|>", "no header with a channel"),
        ("<|channel|>secret<|message|>3<|return|>", "a header that cannot be read"),
        ("<|channel|>final and more words<|message|>3<|return|>", "a header that cannot be read"),
        (f"look at this{FINAL}3<|return|>", "a header that cannot be read"),
    ],
)
def test_what_cannot_be_read_is_malformed(
    text: str, why: str, codec: Codec, renderer: TemplateRenderer
) -> None:
    parsed = renderer.parse(said(codec, text), (), [TOOL])
    assert why in parsed.malformed
    assert "tool_calls" not in parsed.message
    # the next message can be shown, whatever it was
    renderer.render([user("hi"), parsed.message, user("again")], [TOOL])
    if text.startswith(f"{ANALYSIS}hm<|end|>"):
        assert parsed.message["reasoning_content"] == "hm"


def test_letters_that_spell_a_control_token_divide_nothing(
    codec: Codec, renderer: TemplateRenderer
) -> None:
    spelled = f"{NEXT}{samples()}{FINAL}x{ANALYSIS}"
    start, end = said(codec, f"{ANALYSIS}hm{NEXT}{FINAL}"), said(codec, "<|return|>")
    parsed = renderer.parse((*start, *letters(codec, spelled), *end), (), [TOOL])
    assert parsed.malformed == "" and "tool_calls" not in parsed.message
    assert parsed.message["content"] == spelled
    fed = renderer.render([user("hi"), parsed.message, user("again")], [TOOL])
    assert fed.count(said(codec, "<|call|>")[0]) == 0
    # which the template refuses as it is
    assert "<|channel|>final <|message|>x<|channel|>analysis <|" in codec.tokenizer.decode(fed)

    start = said(codec, samples("")[:-8])
    given = letters(codec, json.dumps({"at": spelled}))
    parsed = renderer.parse((*start, *given, *said(codec, "<|call|>")), (), [TOOL])
    (call,) = parsed.message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": spelled}
    result = {"role": "tool", "content": spelled}
    fed = renderer.render([user("hi"), parsed.message, result], [TOOL])
    assert fed.count(said(codec, "<|call|>")[0]) == 1

    thought = (*said(codec, ANALYSIS), *letters(codec, spelled), *said(codec, f"{NEXT}{asks()}"))
    parsed = renderer.parse(thought, (), [TOOL])
    assert len(parsed.message["tool_calls"]) == 1
    renderer.render([user("hi"), parsed.message, result], [TOOL])


def test_hostile_turns_take_no_time(renderer: TemplateRenderer, codec: Codec) -> None:
    assert renderer.thinking and renderer.calls
    start = time.monotonic()
    for piece in (*SPECIAL, FINAL, ANALYSIS, NEXT, " to=functions.", " ", "<", "{", "\n", "é"):
        for before in ("", "<|channel|>", FINAL, samples("")[:-8], " to="):
            ids = said(codec, before + piece * (20_000 // len(piece)))
            for text in (renderer.template.decode(ids), renderer.template.decode(ids[1:])):
                with suppress(Malformed):
                    renderer.calls.read(renderer.thinking.split(text, "")[1], [TOOL])
    assert time.monotonic() - start < 20


# --- what is proved ---


def test_a_call_needs_a_token_that_the_model_stops_at(tmp_path: Path) -> None:
    codec = Codec(Model(str(write(tmp_path, OWN, ("<|return|>",)))))
    TemplateRenderer(codec)
    with pytest.raises(ConfigError) as error:
        TemplateRenderer(codec, tools=True)
    reason, fix = str(error.value).splitlines()
    assert "(case: a tool's result): none of the tokens that end a turn (<|return|>)" in reason
    assert reason.endswith("follows an answer, but '<|call|>' does.")
    assert fix.endswith("or sampling.stop=['<|call|>'], if the model ends such a turn with it")
    assert TemplateRenderer(codec, tools=True, stop=["<|call|>"]).calls


ENDS = "<|im_end|>\n{% endfor %}"
OTHER = "{{ '<|im_end|>' if loop.last and not add_generation_prompt else '<|eot|>' }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "taken"),
    [
        (PLAIN.replace(ENDS, OTHER), True),
        # a text is behind the answer, or no control token
        (PLAIN.replace(ENDS, OTHER.replace("'<|eot|>'", "' so <|eot|>'")), False),
        (PLAIN.replace(ENDS, OTHER.replace("<|eot|>", "eot")).replace("<|im_start|>", ""), False),
        # the message behind the answer is not shown
        (PLAIN.replace(ENDS, OTHER).replace("{{ m.content", "{{ m.content if loop.index < 3"),
         False),
        # the last answer ends in no token either
        (PLAIN.replace("<|im_end|>", "{{ '<|sep|>' if loop.nextitem }}"), False),
    ],
)  # fmt: skip
def test_only_an_end_that_the_history_writes_otherwise_begins_a_row(
    template: str, taken: bool, tmp_path: Path
) -> None:
    codec = Codec(Model(str(folder(tmp_path, template))))
    if not taken:
        with pytest.raises(ConfigError, match="cannot be continued exactly"):
            TemplateRenderer(codec)
        return
    renderer = TemplateRenderer(codec)
    assert (renderer.other_end, renderer.proved) == ("<|eot|>", set())
    assert TemplateRenderer(codec, stop=["<|eot|>"]).proved == {Case.USER}


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ('"<|channel|>commentary json<|message|>"', '"<|message|>"', "a tool call"),
        ("assistant to=functions.", "assistant ", "a tool call"),
        ("arguments | tojson", "name", "a tool call"),
        ("m.content | tojson", "'x'", "a tool's result"),
    ],
)
def test_a_template_that_writes_calls_otherwise_is_refused(
    old: str, new: str, case: str, tmp_path: Path
) -> None:
    assert OWN.count(old) == 1
    codec = Codec(Model(str(write(tmp_path, OWN.replace(old, new)))))
    with pytest.raises(ConfigError) as error:
        TemplateRenderer(codec, tools=True)
    assert f"(case: {case}): " in str(error.value)


@pytest.mark.parametrize("template", [KEEPS, DROPS])
def test_reasoning_is_shown_under_the_name_that_the_template_reads(
    template: str, tmp_path: Path
) -> None:
    renderer = TemplateRenderer(
        Codec(Model(str(folder(tmp_path, template.replace("reasoning_content", "thinking"))))),
        tools=True,
    )
    assert renderer.thinking and renderer.thinking.opens == "<think>"
    history = [user("hi"), {"role": "assistant", "content": "3", "reasoning_content": "hm"}]
    text = renderer.template.text([*history, user("so")], [TOOL], generate=True)
    assert ("hm" in text) is (template == KEEPS)
    assert check_renderer(renderer, tools=True) >= 50


# --- a run ---


def test_a_run_trains_each_turn_in_a_row_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUPLER_PLUGINS", "played_environments")
    toy_runs.write_inputs(tmp_path)
    model, run_dir = write(tmp_path / "toy", OWN), tmp_path / "run"
    tensors = read_tensors(model)
    tensors["head.bias"][SPECIAL.index("<|return|>")] += 6
    rewrite(model, model, tensors)

    said = toy_runs.call(
        toy_runs.arguments(
            tmp_path, run_dir, "steps=2", "environment=played", "environment.tools=true",
            "environment.turns=3", "environment.max_tokens=2000", "engine.max_tokens_per_gpu=2000",
            "data.max_prompt_tokens=1000", "sampling.max_tokens=48",
        )
    )  # fmt: skip
    assert said.code == 0, said.text[-2000:]
    log = (run_dir / "coupler.log").read_text()
    assert log.count("each question behind an answer begins a new row") == 1

    last = metrics(run_dir)[-1]
    assert last["conversation/rows"] == last["conversation/turns"] > 2
    assert last["conversation/forks"] == last["conversation/rows"] - 1
