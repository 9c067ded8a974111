"""Encode text so that it never becomes a control token.

Tokenizers find their added tokens in a whole text. Where such a match holds a character
of a message, the text is encoded by a copy of the tokenizer that knows every control
token under another name: one character that does not occur in the text, and that only
replaces the control tokens which the template wrote.
"""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from coupler.data.traced import TEXT, Traced, runs
from coupler.errors import CouplerError

# Starts of ranges of private characters.
PRIVATE = (0x100000, 0xF0000, 0x104000, 0xF4000, 0x108000, 0xF8000)
WORDS = re.compile(r"[^\W_\d][^\W_]*(\s+[^\W_]+)*|\d+|\s+")


class PlainText:
    """Encodes text of a tokenizer as characters, and text of a template with its
    control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.copies: dict[int, _Copy] = {}

    @cached_property
    def control(self) -> dict[int, str]:
        """Ids and contents of the control tokens.

        An added token that is not special and has only letters, digits or blanks is a
        word of the vocabulary.
        """
        added = self.tokenizer.added_tokens_decoder
        found = {
            id: str(token.content)
            for id, token in added.items()
            if token.special or not WORDS.fullmatch(token.content)
        }

        special = zip(
            self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True
        )
        return found | {id: str(text) for id, text in special if id is not None}

    @cached_property
    def unknown(self) -> int | None:
        """The id of text that the tokenizer does not know, if it has one."""
        return self.tokenizer.unk_token_id

    def encode(self, text: Traced, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Encode ``text``. Without a control token in its messages, the ids are those
        that the tokenizer gives.

        Raises:
            CouplerError: the tokenizer cannot encode a control token's text as
                characters.
        """
        plain = str.__str__(text)
        if self.tokenizer.is_fast:  # one pass gives the ids and their places
            made = self._fast(plain, add_special_tokens)
            ids = made.ids
            matches = self._controls(plain, ids, made.offsets)
        else:
            ids = self.tokenizer.encode(plain, add_special_tokens=add_special_tokens)
            matches = self._matches(plain)

        if not any(TEXT in text.marks[start:end] for start, end, _ in matches):
            return tuple(ids)
        return self._copy(text).encode(self._renamed(text)[0], add_special_tokens)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids that a fast tokenizer gives, control tokens among them."""
        return tuple(self._fast(text, False).ids)

    def locate(
        self, text: Traced, *, add_special_tokens: bool = False
    ) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Encode ``text``. Return the ids of :meth:`encode`, and start and end of each
        in the text.

        Raises:
            CouplerError: as :meth:`encode`, or the tokenizer does not say where its
                tokens lie.
        """
        if not self.tokenizer.is_fast:
            raise CouplerError(
                "a tokenizer without tokenizer.json does not say where its tokens lie.\n"
                "  try:  saving it by AutoTokenizer.from_pretrained(FOLDER, use_fast=True)"
            )
        plain = str.__str__(text)
        made = self._fast(plain, add_special_tokens)
        ids, places = made.ids, made.offsets
        matches = self._controls(plain, ids, places)
        if not any(TEXT in text.marks[start:end] for start, end, _ in matches):
            return tuple(ids), places

        renamed, starts = self._renamed(text)
        copied = self._copy(text)
        found = copied.encode(renamed, add_special_tokens)
        places = copied.made.encode(renamed, add_special_tokens=add_special_tokens).offsets
        return found, [(starts[start], starts[end]) for start, end in places]

    def _fast(self, text: str, add_special_tokens: bool) -> Any:
        """Return ids and offsets of the tokenizer's own library, which neither pads nor
        truncates.

        Transformers calls it too, with more time around it than in it.
        """
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation or backend.padding:
            backend.no_truncation()
            backend.no_padding()
        return backend.encode(text, add_special_tokens=add_special_tokens)

    def _matches(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and id of the control tokens that the tokenizer finds."""
        if not self.tokenizer.is_fast:
            at = 0
            ids = {content: id for id, content in self.control.items()}
            for piece in self.tokenizer.tokens_trie.split(text):
                if piece in ids:
                    yield at, at + len(piece), ids[piece]
                at += len(piece)
            return

        found = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        yield from self._controls(text, found.ids, found.offsets)

    def _controls(
        self, text: str, ids: Iterable[int], offsets: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, int, int]]:
        unknown, control = self.unknown, self.control
        found = [(id, place) for id, place in zip(ids, offsets, strict=True) if id in control]
        for id, (start, end) in found:
            if id != unknown or control[id] in text[start:end]:
                yield start, end, id

    def _renamed(self, text: Traced) -> tuple[str, list[int]]:
        """Put the characters of the copy where the template wrote control tokens.

        Returns:
            The text, and for each of its characters and for its end the place in
            ``text``.
        """
        names, made, starts, at = self._copy(text).names, list[str](), list[int](), 0
        for mark, end in runs(text.marks):
            first, at = at, end
            part = str.__str__(text)[first:at]

            done = 0
            for start, stop, id in () if mark == TEXT else self._matches(part):
                made += part[done:start], names[id]
                starts += [*range(first + done, first + start), first + start]
                done = stop
            made.append(part[done:])
            starts += range(first + done, at)
        return "".join(made), [*starts, at]

    def _copy(self, text: str) -> _Copy:
        for start in PRIVATE:
            names = {id: chr(start + i) for i, id in enumerate(sorted(self.control))}
            if not any(start <= ord(character) < start + len(names) for character in text):
                if start not in self.copies:
                    kind = _FastCopy if self.tokenizer.is_fast else _SlowCopy
                    self.copies[start] = kind(self.tokenizer, self.control, names)
                return self.copies[start]
        raise CouplerError("it holds private characters of every range, and control tokens.")


class _Copy(ABC):
    """A tokenizer that knows control tokens by other names."""

    def __init__(self, tokenizer: Any, control: dict[int, str], names: dict[int, str]) -> None:
        self.control, self.names = control, names
        self.known = set(names.values())
        self.unknown = tokenizer.unk_token_id
        self.renamed = {content: names[id] for id, content in control.items()}
        self.made = self._make(tokenizer)

    @abstractmethod
    def _make(self, tokenizer: Any) -> Any:
        """Build the copy."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Encode ``text``, in which control tokens have their other names."""

    def _check(self, id: int, token: str) -> int:
        if id in self.control and id != self.unknown and token not in self.known:
            raise CouplerError(
                f"it holds {self.control[id]!r}, which this tokenizer cannot encode as plain "
                "characters.\n  try:  data.control_tokens=true, if control tokens are meant"
            )
        return id


class _FastCopy(_Copy):
    """A copy of a tokenizer of the package tokenizers, made from its JSON."""

    def _make(self, tokenizer: Any) -> Any:
        from tokenizers import Tokenizer

        data = json.loads(tokenizer.backend_tokenizer.to_str())
        normalizer = tokenizer.backend_tokenizer.normalizer
        data["truncation"] = data["padding"] = None
        added = {token["id"]: token for token in data["added_tokens"]}
        for id, token in added.items():
            if id in self.names:
                name = token["content"] = self.names[id]
                survives = not normalizer or normalizer.normalize_str(name) == name
                token |= {"normalized": token["normalized"] and survives, "single_word": False}

        self._rename_vocabulary(data["model"])
        made = Tokenizer.from_str(json.dumps(data))
        self.ids = {made.token_to_id(token["content"]): id for id, token in added.items()}
        return made

    def _rename_vocabulary(self, model: dict[str, Any]) -> None:
        """Keep the model from finding a control token in plain text."""
        vocabulary, renamed = model["vocab"], self.renamed
        if isinstance(vocabulary, list):  # of Unigram: pairs of a piece and a score
            model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocabulary]
        else:
            for content, name in renamed.items():
                if content in vocabulary:
                    vocabulary[name] = vocabulary.pop(content)

        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
        if model.get("merges"):
            pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
            model["merges"] = [m for m in pairs if not renamed.keys() & {m[0], m[1], "".join(m)}]

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        found = self.made.encode(text, add_special_tokens=add_special_tokens)
        parts = zip(found.ids, found.tokens, found.special_tokens_mask, strict=True)
        return tuple(
            id if special else self._check(self.ids.get(id, id), token)
            for id, token, special in parts
        )


class _SlowCopy(_Copy):
    """A copy of a tokenizer that is written in Python."""

    def _make(self, tokenizer: Any) -> Any:
        made = copy.deepcopy(tokenizer)
        made._added_tokens_decoder = {}
        for id, token in tokenizer.added_tokens_decoder.items():
            token = copy.deepcopy(token)
            token.content = self.names.get(id, token.content)
            made._added_tokens_decoder[id] = token

        made._added_tokens_encoder = {t.content: i for i, t in made._added_tokens_decoder.items()}
        made.tokens_trie = type(tokenizer.tokens_trie)(list(made._added_tokens_encoder))
        for name, value in tokenizer.special_tokens_map.items():
            if isinstance(value, str):
                setattr(made, name, self.renamed.get(value, value))
        return made

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        tokens = self.made.tokenize(text)
        found = self.made.convert_tokens_to_ids(tokens)
        ids = [self._check(id, token) for id, token in zip(found, tokens, strict=True)]
        return tuple(self.made.build_inputs_with_special_tokens(ids) if add_special_tokens else ids)
