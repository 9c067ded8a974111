"""Text to tokens and back, with tokenizers made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coupler.batch.trajectory import Origin, columns_of
from coupler.config.schema import DataConfig
from coupler.data import Codec, Prompt, Row, encode_prompts, supervised
from coupler.errors import ConfigError, CouplerError, DataError
from coupler.interfaces import Model

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REASONING_DROPPED = TURNS.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1].strip() }}"
)
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + TURNS
)


def folder(path: Path, template: str | None, eos: str = "<|endoftext|>") -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["what is 1 + 2 ? the answer is 3 ."] * 10, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = template
    fast.save_pretrained(path)
    return path


@pytest.fixture
def chat(tmp_path: Path) -> Codec:
    return Codec(Model(str(folder(tmp_path, TURNS + START))))


WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)


def text_of(codec: Codec, ids: tuple[int, ...]) -> str:
    return codec.tokenizer.decode(list(ids))


def test_a_string_becomes_one_user_message(chat: Codec) -> None:
    ids = chat.prompt_ids("1 + 2 ?", "")
    assert text_of(chat, ids) == "<|im_start|>user\n1 + 2 ?<|im_end|>\n<|im_start|>assistant\n"
    assert ids == chat.prompt_ids(({"role": "user", "content": "1 + 2 ?"},), "")
    assert ids[0] == chat.tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_the_system_prompt_comes_first_and_once(chat: Codec) -> None:
    assert text_of(chat, chat.prompt_ids("x", "be brief")).startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n"
    )
    with pytest.raises(CouplerError, match="system message of its own"):
        chat.prompt_ids(
            ({"role": "system", "content": "a"}, {"role": "user", "content": "x"}), "be brief"
        )


def test_a_target_ends_the_turn_and_decodes_to_itself(chat: Codec) -> None:
    ids = chat.target_ids("the answer is 3 .")
    assert ids[-1] == chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.decode(ids) == "the answer is 3 ."
    assert chat.decode(chat.target_ids("é \n 中")) == "é \n 中"


def test_stops_come_from_the_template_the_tokenizer_and_the_generation_config(
    tmp_path: Path,
) -> None:
    path = folder(tmp_path, TURNS + START)
    ids = Codec(Model(str(path))).tokenizer.convert_tokens_to_ids
    assert Codec(Model(str(path))).stop_ids([]) == (ids("<|im_end|>"), ids("<|endoftext|>"))
    for eos, more in ((ids("<pad>"), (ids("<pad>"),)), ([0, 7, 2], (7,)), (None, ())):
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        codec = Codec(Model(str(path)))
        assert codec.stop_ids([]) == (ids("<|im_end|>"), ids("<|endoftext|>"), *more)
    assert codec.stop_ids(["."])[-1] == ids(".")
    with pytest.raises(ConfigError, match=r"sampling.stop: 'xyz' is 3 tokens"):
        codec.stop_ids(["xyz"])


def test_without_a_chat_template_text_is_encoded_as_it_is(tmp_path: Path) -> None:
    codec = Codec(Model(str(folder(tmp_path, None))))
    assert text_of(codec, codec.prompt_ids("1 + 2 ?", "")) == "1 + 2 ?"
    assert codec.stop_ids([]) == (codec.tokenizer.eos_token_id,) == codec.target_ids("x")[-1:]
    assert codec.probe_prefix_preserving() is None
    for prompt, system, what in (
        ("x", "be brief", "data.system_prompt"),
        (({"role": "user", "content": "x"},), "", "messages"),
    ):
        with pytest.raises(CouplerError, match=f"{what} needs a chat template"):
            codec.prompt_ids(prompt, system)


def test_a_template_that_rewrites_earlier_turns_is_found(tmp_path: Path, chat: Codec) -> None:
    assert chat.probe_prefix_preserving() is None
    drops = Codec(Model(str(folder(tmp_path / "drops", REASONING_DROPPED + START))))
    found = drops.probe_prefix_preserving()
    assert found is not None
    assert "at turn 2" in found
    assert "<think>" in found
    assert "becomes" in found


def test_a_refusal_of_the_template_names_the_row(tmp_path: Path) -> None:
    codec = Codec(Model(str(folder(tmp_path, STRICT + START))))
    rows = [Row("x", "", 0, {}), Row(({"role": "system", "content": "s"},), "", 7, {})]
    with pytest.raises(DataError, match=r"row 7 .*refuses messages of system: no system role"):
        encode_prompts(rows, codec, DataConfig(source="a.jsonl"))


def test_overlong_prompts_are_an_error_or_dropped_and_counted(chat: Codec) -> None:
    rows = [
        Row("x", "", 0, {}),
        Row("x" * 100, "", 1, {}),
        Row("x" * 90, "", 2, {}),
        Row("y", "", 3, {}),
    ]
    short = len(chat.prompt_ids("x", ""))
    config = DataConfig(source="a.jsonl", max_prompt_tokens=short)
    with pytest.raises(DataError) as error:
        encode_prompts(rows, chat, config)
    assert str(error.value) == (
        f"2 of 4 prompts are longer than data.max_prompt_tokens={short}; "
        f"the first is row 1 (from 0) of a.jsonl with {short + 99} tokens.\n"
        f"  try:  data.max_prompt_tokens={short + 99}, or data.drop_overlong=true"
    )
    config.drop_overlong = True
    kept = [Prompt(row, chat.prompt_ids(str(row.prompt), "")) for row in (rows[0], rows[3])]
    found, dropped = encode_prompts(rows, chat, config)
    assert [(prompt.row, prompt.ids) for prompt in found] == [(p.row, p.ids) for p in kept]
    assert found[1].messages == ({"role": "user", "content": "y"},) and dropped == 2
    with pytest.raises(DataError, match="1 of 1 prompts"):
        encode_prompts(rows[1:2], chat, config)


def test_rows_beyond_the_models_positions_are_dropped_and_counted(tmp_path: Path) -> None:
    path = folder(tmp_path, None)
    (path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 8}}))
    codec, config = Codec(Model(str(path))), DataConfig(source="a.jsonl", drop_overlong=True)
    rows = [
        Row("x" * 3, "y" * 4, 0, {}),
        Row("x" * 3, "y" * 5, 1, {}),
        Row("x" * 8, "y", 2, {}),
        Row("x" * 7, "y", 3, {}),
    ]
    kept, dropped = encode_prompts(rows, codec, config)
    assert ([p.row.index for p in kept], dropped) == ([0, 1, 3], 1)
    examples, dropped = supervised(rows, codec, config)
    assert ([len(e) for e in examples], dropped) == ([8], 3)


def test_supervised_rows_are_prompt_and_target(chat: Codec) -> None:
    config = DataConfig(source="a.jsonl", system_prompt="be brief")
    (trajectory,), dropped = supervised([Row("1 + 2 ?", "3", 0, {})], chat, config)
    prompt, target = trajectory.segments
    assert dropped == 0
    assert (prompt.origin, prompt.ids) == (Origin.PROMPT, chat.prompt_ids("1 + 2 ?", "be brief"))
    assert (target.origin, target.ids) == (Origin.TARGET, chat.target_ids("3"))
    assert columns_of([trajectory])["loss_mask"].sum() == 2
    with pytest.raises(DataError, match=r"row 4 \(from 0\) of a.jsonl has an empty answer"):
        supervised([Row("x", "", 4, {})], chat, config)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CouplerError, match=r"the tokenizer of model\.path="):
        Codec(Model(str(tmp_path)))


def test_tools_of_a_row_are_shown_by_a_template_that_knows_them(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "add", "description": "2 <|im_end|> 2"}}
    rows = [
        Row("hi", "", 0, {"tools": [schema]}),
        Row("hi", "", 1, {}),
        Row("hi", "", 2, {"tools": ["add"]}),  # for the environment alone
    ]
    config = DataConfig(source="a.jsonl")
    codec = Codec(Model(str(folder(tmp_path / "tools", WITH_TOOLS + TURNS + START))))
    shown, *plain = (p.ids for p in encode_prompts(rows, codec, config)[0])

    text = text_of(codec, shown)
    assert text.startswith("<|im_start|>system\n{") and '"name": "add"' in text
    end = codec.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert shown.count(end) == 2, "a control token in a description is plain text"
    assert plain == [codec.prompt_ids("hi", "")] * 2

    knows_none = Codec(Model(str(folder(tmp_path / "none", TURNS + START))))
    assert len({p.ids for p in encode_prompts(rows, knows_none, config)[0]}) == 1
