"""Conversations of a family that the renderers library knows and that the built-in
renderer refuses, with a tokenizer made here.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coupler.cli import main
from coupler.conversation import (
    Codec,
    Conversation,
    Limits,
    TemplateRenderer,
)
from coupler.conversation.choice import choose_renderer
from coupler.errors import ConfigError, CouplerError
from coupler.interfaces import Model, Request
from coupler.testing.conversations import TOOL, Scripted, check_recording, check_renderer
from coupler.testing.models import write_toy

pytest.importorskip("renderers")

TEMPLATE = Path(__file__).with_name("gemma4.jinja").read_text()
# the proof of the built-in renderer has longer histories than that of the library
SHORT = "{{ raise_exception('too long') if messages | length > 6 }}" + TEMPLATE
TOKENS = [
    "<bos>", "<eos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>",
    "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", "<|image>", "<|image|>", "<image|>", '<|"|>',
]  # fmt: skip
USER = {"role": "user", "content": "what is 1 + 2 ?"}
NAME = "gemma-4-E2B-it"


def folder(path: Path, template: str = TEMPLATE) -> Path:
    """Write a tokenizer with the control tokens of Gemma 4."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["what is 1 + 2 ? the answer is 3 ."] * 10, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = template
    fast.save_pretrained(path)

    stops = [fast.convert_tokens_to_ids(text) for text in ("<turn|>", "<|tool_response>")]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return path


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec(Model(str(folder(tmp_path_factory.mktemp("models") / NAME))))


@pytest.fixture(scope="module")
def renderer(codec: Codec) -> Any:
    return choose_renderer(codec, "renderers", tools=True)


def said(codec: Codec, text: str) -> tuple[int, ...]:
    return codec.encode([(text, False)])


def test_every_extension_is_the_end_of_the_full_rendering(renderer: Any, codec: Codec) -> None:
    assert str(renderer) == "gemma4 of the renderers library"
    assert check_renderer(renderer, tools=True) == 50
    plain = choose_renderer(codec, "renderers:gemma4")
    assert check_renderer(plain) == 25
    turns = ("3<turn|>", " a <s> <turn|>", "<|channel>thought\nhm\n<channel|>3<turn|>")
    for seed in range(3):
        asyncio.run(check_recording(plain, lambda r: said(codec, r.choice(turns)), seed))


def test_a_conversation_with_tools_is_one_row_that_the_template_would_write(
    renderer: Any, codec: Codec
) -> None:
    turns = [
        '<|tool_call>call:look{at:<|"|>the <b>door<|"|>}<tool_call|><|tool_response>',
        '<|tool_call>call:look{at:<|"|>a<|"|>}<tool_call|><|tool_call>call:look{at:<|"|>b<|"|>}'
        "<tool_call|><|tool_response>",
        "it is red<turn|>",
    ]
    left = [said(codec, turn) for turn in turns]
    rollout = Scripted(lambda _: left.pop(0))
    conversation = Conversation(
        rollout, renderer, Limits(completion_tokens=512), Request((), 1, seed=5)
    )

    history: list[Any] = [{"role": "system", "content": "be brief"}, USER]
    for _ in turns:
        reply = asyncio.run(conversation.chat(history, [TOOL]))
        expected = codec.prompt_ids(history, "", tools=[TOOL])
        assert rollout.requests[-1].prompt == expected
        calls = reply.message.get("tool_calls", [])
        history = [*history, _parsed(reply.message)]
        history += [
            {"role": "tool", "tool_call_id": call["id"], "content": "<turn|> closed"}
            for call in calls
        ]

    (row,) = conversation.close()
    assert not conversation.forks
    assert sum(s.origin == "sampled" for s in row.trajectory.segments) == 3


def _parsed(message: Any) -> dict[str, Any]:
    """Return a message whose arguments are objects, as this template takes them."""
    calls = []
    for call in message.get("tool_calls", []):
        function = call["function"]
        given = {**function, "arguments": json.loads(function["arguments"])}
        calls.append({**call, "function": given})
    return {**message, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize(
    ("text", "content", "calls", "malformed"),
    [
        ("3", "3", [], ""),
        ('<|tool_call>call:look{at:<|"|>x<|"|>}<tool_call|>', "", [("look", {"at": "x"})], ""),
        ("go<|tool_call>call:fly{to:[1,true,null]}<tool_call|>", "go",
         [("fly", {"to": [1, True, None]})], ""),
        ("<|tool_call>call:look{at:", "<|tool_call>call:look{at:", [], "unclosed_block"),
        ("<|tool_call>look<tool_call|>", "<|tool_call>look<tool_call|>", [], "malformed"),
    ],
)  # fmt: skip
def test_turns_are_read(
    renderer: Any, codec: Codec, text: str, content: str, calls: list[Any], malformed: str
) -> None:
    prompt = renderer.render([USER], [TOOL])
    ids = said(codec, f"<|channel>thought\nhm\n<channel|>{text}<turn|>")
    parsed = renderer.parse(ids, prompt, [TOOL])
    functions = [call["function"] for call in parsed.message.get("tool_calls", [])]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == calls
    assert malformed in parsed.malformed and bool(parsed.malformed) == bool(malformed)
    assert parsed.message["reasoning_content"] == "hm"
    if not malformed:
        assert parsed.message["content"] == content
    assert text in renderer.parse(ids, prompt, []).message["content"] or text == "3"


def test_text_of_messages_never_becomes_a_control_token(renderer: Any, codec: Codec) -> None:
    every = " ".join(TOKENS)
    tool = {"type": "function", "function": {**TOOL["function"], "description": every}}
    hostile = renderer.render([{"role": "user", "content": f"x {every} x"}], [tool])
    plain = renderer.render([{"role": "user", "content": "x"}], [TOOL])
    for token in ("<|turn>", "<turn|>", "<|tool_call>", "<bos>", "<|channel>"):
        id = codec.tokenizer.convert_tokens_to_ids(token)
        assert hostile.count(id) == plain.count(id)
    assert every in codec.tokenizer.decode(hostile)


@pytest.mark.parametrize(
    ("place", "config"),
    [
        ("gemma-4-e4b-it", {}),
        ("models--google--gemma-4-E2B-it/snapshots/1a2b", {}),
        ("mine", {"_name_or_path": "google/gemma-4-E2B-it"}),
    ],
)
def test_a_model_is_known_by_its_name(place: str, config: Any, tmp_path: Path) -> None:
    path = folder(tmp_path / place)
    (path / "config.json").write_text(json.dumps({"model_type": "gemma4", **config}))
    renderer: Any = choose_renderer(Codec(Model(str(path))), "renderers", tools=True)
    assert renderer.family == "gemma4"


def test_auto_takes_the_library_where_the_template_is_refused(tmp_path: Path) -> None:
    codec = Codec(Model(str(folder(tmp_path / NAME, SHORT))))
    with pytest.raises(ConfigError, match="cannot be continued exactly"):
        TemplateRenderer(codec, tools=True)
    with pytest.raises(ConfigError, match="cannot be continued exactly"):
        choose_renderer(codec, "template", tools=True)
    assert isinstance(choose_renderer(codec), TemplateRenderer)
    assert str(choose_renderer(codec, tools=True)).startswith("gemma4")


def test_a_template_that_the_library_does_not_write_is_refused(tmp_path: Path) -> None:
    other = SHORT.replace("'<|turn>model\\n'", "'<|turn>model\\nNow:\\n'")
    codec = Codec(Model(str(folder(tmp_path / NAME, other))))
    with pytest.raises(ConfigError) as error:
        choose_renderer(codec, tools=True)
    first, *rest = str(error.value).splitlines()
    assert "cannot be continued exactly (case: a user's message)" in first
    assert "it writes a prompt otherwise than the chat template" in rest[-1]
    assert rest[-1].startswith("  renderers:  ")


def test_a_model_that_the_library_does_not_know_is_refused(tmp_path: Path) -> None:
    codec = Codec(Model(str(folder(tmp_path / "mine", SHORT))))
    with pytest.raises(ConfigError) as error:
        choose_renderer(codec, tools=True)
    assert "does not know the model of " in str(error.value)
    assert "set:  environment.renderer=renderers:FAMILY" in str(error.value)
    assert str(choose_renderer(codec, "renderers:gemma4", tools=True)).startswith("gemma4")

    with pytest.raises(ConfigError, match=r"renderers:gemma9: the library has no such renderer"):
        choose_renderer(codec, "renderers:gemma9", tools=True)
    with pytest.raises(CouplerError, match=r"renderer qwen3 cannot be made|otherwise than"):
        choose_renderer(codec, "renderers:qwen3", tools=True)


def test_a_run_is_trained_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / NAME
    write_toy(model)
    folder(model, SHORT)
    rows = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        "engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy", "trackers=[jsonl]",
        "environment=tools", "environment.functions=[played_tools:add]",
        "environment.max_turns=2", "environment.max_tokens=2000",
        "engine.max_tokens_per_gpu=4096", "data.max_prompt_tokens=400",
        "sampling.max_tokens=24", "prompts_per_step=2", "samples_per_prompt=2", "steps=1",
        f"model.path={model}", f"data.source={tmp_path / 'rows.jsonl'}",
        f"run_dir={tmp_path / 'run'}", "reward.target=played_tools:length",
    ]  # fmt: skip
    assert main(["plan", *given]) == 0
    assert "the chat template, if it is proved, else renderers" in capsys.readouterr().out
    assert main(["train", *given]) == 0, capsys.readouterr().err
    log = (tmp_path / "run" / "coupler.log").read_text()
    assert "messages become ids by gemma4 of the renderers library" in log

    refused = ["train", *given, "environment.renderer=template", f"run_dir={tmp_path / 'other'}"]
    assert main(refused) == 2
    assert "cannot be continued exactly (case: a user's message)" in capsys.readouterr().err
