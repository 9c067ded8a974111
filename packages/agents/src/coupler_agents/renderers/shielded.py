"""Keep control tokens in the text of messages from the library, which encodes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from coupler.conversation import Codec

FIRST = 0x10C000  # of private characters, which stand for control tokens


class Shielded:
    """A tokenizer for which one character of a text stands for a control token.

    It encodes this character as the text of the control token, in plain characters.
    Control tokens elsewhere are those that the library writes itself.

    Attributes:
        name_or_path: the name of the model on the hub, by which the library tells
            models of one family apart.
    """

    def __init__(self, codec: Codec, name: str) -> None:
        self.codec, self.name_or_path = codec, name
        texts = sorted(
            codec.control_texts,
            key=len,
            reverse=True,
        )
        self.texts = {chr(FIRST + place): text for place, text in enumerate(texts)}
        self.characters = {text: character for character, text in self.texts.items()}
        self.control = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self.shields = re.compile(f"([{''.join(self.texts)}])" if texts else r"((?!))")

    def __getattr__(self, name: str) -> Any:
        # Called, the tokenizer would encode past this class.
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self.codec.tokenizer, name)

    def shield(self, value: Any) -> Any:
        """Replace control tokens in every text of a message or a tool."""
        if isinstance(value, str):
            return self.control.sub(lambda found: self.characters[found.group()], value)
        if isinstance(value, Mapping):
            return {self.shield(key): self.shield(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.shield(each) for each in value]
        return value

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode what the library writes."""
        parts = self.shields.split(text)
        told = [(self.texts.get(part, part), part in self.texts) for part in parts if part]
        return list(self.codec.encode(told, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        """Decode ids, and leave blanks as they are."""
        return self.codec.tokenizer.decode(
            list(ids),
            **{"clean_up_tokenization_spaces": False, **options},
        )
