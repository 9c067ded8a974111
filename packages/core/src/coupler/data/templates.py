"""Turn text into token ids and back. No other module does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from coupler.data.control import PlainText
from coupler.data.dataset import Messages
from coupler.data.folder_check import check_tokenizer
from coupler.data.traced import Traced, concat, template, trace
from coupler.errors import ConfigError, CouplerError
from coupler.interfaces import Model
from coupler.system.files import DamagedFile, read_json

MARK = "coupler"  # a word to find again in a rendered conversation


class Codec:
    """The tokenizer and chat template of one model folder. It never pads and never
    truncates.

    Raises:
        CouplerError: the folder or its tokenizer is missing or cannot be loaded.
    """

    def __init__(self, model: Model) -> None:
        self.folder = Path(model.path)
        if not model.path or not self.folder.is_dir():
            raise CouplerError(
                f"model.path={model.path!r} is no folder.\n"
                "  try:  a downloaded model, for example of:  hf download ORG/NAME "
                "--local-dir models/NAME"
            )
        check_tokenizer(self.folder)
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=model.trust_remote_code, local_files_only=True
            )
        # A hostile file makes transformers and tokenizers raise nearly any type.
        except Exception as error:
            raise CouplerError(
                f"the tokenizer of model.path={model.path} cannot be loaded: {error}\n"
                "  try:  copy tokenizer.json and tokenizer_config.json of the model into "
                f"{model.path} again"
            ) from error

    def prompt_ids(
        self,
        prompt: str | Messages,
        system_prompt: str,
        *,
        tools: Sequence[Any] = (),
        control_tokens: bool = False,
    ) -> tuple[int, ...]:
        """Encode a prompt up to where the policy speaks.

        Messages go through the chat template, with its generation prompt. A string
        becomes one user message if the tokenizer has a chat template, and is encoded as
        it stands, with the tokenizer's own special tokens, if not. ``system_prompt``
        becomes the first message.

        Args:
            tools: OpenAI JSON schemas, which the chat template shows if it knows tools.
            control_tokens: False encodes a control token in the text as plain
                characters. Only the chat template writes control tokens then.

        Raises:
            CouplerError: the template refuses the messages, there is none, or there are
                two system prompts.
        """
        text, special = self._prompt_text(prompt, system_prompt, tools)
        return self._encode(text, control_tokens, add_special_tokens=special)

    def example_ids(
        self,
        prompt: str | Messages,
        answer: str,
        system_prompt: str = "",
        *,
        tools: Sequence[Any] = (),
        control_tokens: bool = False,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Encode a prompt with an answer as one text, and divide the ids.

        Encoded apart, the first word of the answer would be that of a new text, which
        many tokenizers mark: ``▁Paris`` for ``Paris``.

        Returns:
            The ids of the prompt, which are those of :meth:`prompt_ids`, and of the
            answer with the token that ends its turn. A token that holds the end of the
            prompt and the beginning of the answer is of the answer.

        Raises:
            CouplerError: as :meth:`prompt_ids`.
        """
        text, special = self._prompt_text(prompt, system_prompt, tools)
        before = self._encode(text, control_tokens, add_special_tokens=special)
        whole = concat([text, Traced(answer)])
        if control_tokens:
            whole = template(str.__str__(whole))
        ids = self._plain.encode(whole, add_special_tokens=special)

        at = len(before)
        if ids[:at] != before:
            at = self._first_behind(whole, len(text), ids, special, shared=before)
        said = ids[at:-1] if ids[at:][-1:] == (self.end_of_turn,) and special else ids[at:]
        return ids[:at], (*said, self.end_of_turn)

    def locate(
        self, text: Traced, *, add_special_tokens: bool = False
    ) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Encode rendered text. Return its ids, and where each lies in the text.

        Raises:
            CouplerError: the tokenizer does not say where its tokens lie.
        """
        return self._plain.locate(text, add_special_tokens=add_special_tokens)

    def _first_behind(
        self,
        text: Traced,
        place: int,
        ids: tuple[int, ...],
        special: bool,
        *,
        shared: tuple[int, ...],
    ) -> int:
        """Return the number of the first of ``ids`` that ends behind ``place``.

        Without places of tokens, it is the first that differs from ``shared``.
        """
        if not self.tokenizer.is_fast:
            pairs = zip(ids, shared, strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), len(shared))
        places = self.locate(text, add_special_tokens=special)[1]
        return next((i for i, (_, end) in enumerate(places) if end > place), len(ids))

    def _prompt_text(
        self, prompt: str | Messages, system_prompt: str, tools: Sequence[Any]
    ) -> tuple[Traced, bool]:
        """Return a prompt as text, and whether the tokenizer adds special tokens.

        Raises:
            CouplerError: see :meth:`prompt_ids`.
        """
        if self.tokenizer.chat_template:
            messages = messages_of(prompt, system_prompt)
            return self.render(messages, tools, generate=True), False

        if system_prompt or not isinstance(prompt, str):
            what = "data.system_prompt" if system_prompt else "a prompt of messages"
            raise CouplerError(
                f"{what} needs a chat template, which the tokenizer of {self.folder} lacks."
            )
        return Traced(prompt), True

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        *,
        generate: bool,
        follow: Callable[[Any], Any] = trace,
    ) -> Traced:
        """Render messages by the chat template, with the generation prompt if
        ``generate``.

        Args:
            follow: makes traced messages of messages.

        Raises:
            CouplerError: the template refuses them.
        """
        from jinja2 import TemplateError

        try:
            return self._sandbox.render(
                self.tokenizer.get_chat_template(tools=list(tools) or None),
                list(messages),
                follow,
                **self.tokenizer.special_tokens_map,
                tools=trace(list(tools)) or None,
                documents=None,
                add_generation_prompt=generate,
            )
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise CouplerError(
                f"the chat template of {self.folder} refuses messages of {roles}: {error}"
            ) from None

    def target_ids(self, text: str, *, control_tokens: bool = False) -> tuple[int, ...]:
        """Encode ``text`` as the policy would have sampled it after a prompt, with the
        token that ends its turn.

        Args:
            control_tokens: False encodes a control token in ``text`` as plain
                characters.
        """
        return (*self._encode(text, control_tokens), self.end_of_turn)

    def encode(
        self, parts: Iterable[tuple[str, bool]], *, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """Encode a text in parts. A part that comes with True is text of a message,
        whose control tokens are encoded as plain characters.
        """
        text = concat(Traced(part) if plain else template(part) for part, plain in parts)
        return self._plain.encode(text, add_special_tokens=add_special_tokens)

    def conversation_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Encode a whole conversation, without a generation prompt.

        Without a chat template, a message and its answer are encoded as one text.
        Control tokens in texts are encoded as plain characters.

        Raises:
            CouplerError: the template refuses the messages, or there is none and they
                are more than two.
        """
        if not self.tokenizer.chat_template:
            if len(messages) != 2:
                raise CouplerError(
                    "a prompt of several messages needs a chat template, which the tokenizer of "
                    f"{self.folder} lacks."
                )
            text = "".join(str(message["content"]) for message in messages)
            return self._encode(text, False, add_special_tokens=True)
        rendered = self.render(messages, generate=False)
        return self._encode(rendered, control_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens. The text is for parsing
        only: it is never encoded again.
        """
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def stop_ids(self, extra: Iterable[str]) -> tuple[int, ...]:
        """Return the ids that end a completion: the end of a turn, those of
        generation_config.json, and ``extra`` tokens.

        Raises:
            ConfigError: a string of ``extra`` is not one token.
        """
        ids = [self.end_of_turn, self.tokenizer.eos_token_id, *self._generation_eos()]
        for text in extra:
            encoded = self._encode(text, control_tokens=True)
            if len(encoded) != 1:
                raise ConfigError(
                    f"sampling.stop: {text!r} is {len(encoded)} tokens of this tokenizer; a "
                    "stop must be one token.\n"
                    f"  it is:  {' '.join(self.tokenizer.convert_ids_to_tokens(list(encoded)))}"
                )
            ids += encoded
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    @cached_property
    def end_of_turn(self) -> int:
        """The special token that the chat template puts after an assistant's text, or
        the end-of-text token.

        Raises:
            CouplerError: there is neither.
        """
        if self.tokenizer.chat_template:
            turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": MARK}]
            _, mark, after = self.render(turns, generate=False).rpartition(MARK)
            special = {
                i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special
            }
            ends = (
                [i for i in self._encode(after, control_tokens=True) if i in special]
                if mark
                else []
            )
            if ends:
                return ends[0]

        if self.tokenizer.eos_token_id is None:
            raise CouplerError(
                f"the tokenizer of {self.folder} has no token that ends a text.\n  try:  "
                "setting eos_token"
            )
        return self.tokenizer.eos_token_id

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """The texts of the tokenizer's control tokens, such as ``<|im_start|>``."""
        return frozenset(self._plain.control.values())

    @cached_property
    def max_positions(self) -> int:
        """The longest sequence that the model was made for, or 0 where its config.json
        does not say.
        """
        config = self._json("config.json")
        config = config.get("text_config", config)
        return config.get("max_position_embeddings") or 0

    @cached_property
    def padding(self) -> int | None:
        """The id of ``pad_token_id`` in the model's config.json, if it has one."""
        return self._json("config.json").get("pad_token_id")

    def probe_prefix_preserving(self) -> str | None:
        """Render a conversation turn by turn and at once. Return the first difference,
        or None if there is none.

        A difference means that the prompt of a later turn is not the earlier prompt
        plus the sampled answer. The policy would then not have seen the trajectory that
        it is trained on.
        """
        if not self.tokenizer.chat_template:
            return None

        for answer in ("one two", "<think>\nstep\n</think>\n\none two"):
            messages: list[dict[str, Any]] = [{"role": "user", "content": "first"}]
            for turn in range(2, 4):
                before = self.render(messages, generate=True) + answer
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": f"turn {turn}"},
                ]
                after = self.render(messages, generate=True)
                if not after.startswith(before):
                    return _difference(before, after, turn)
        return None

    def _encode(
        self, text: str, control_tokens: bool, *, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        if control_tokens:
            return tuple(
                self.tokenizer.encode(str.__str__(text), add_special_tokens=add_special_tokens)
            )
        return self._plain.encode(Traced(text), add_special_tokens=add_special_tokens)

    @cached_property
    def _sandbox(self) -> Any:
        from coupler.data.sandbox import Sandbox

        return Sandbox()

    @cached_property
    def _plain(self) -> PlainText:
        return PlainText(self.tokenizer)

    def _generation_eos(self) -> list[int]:
        eos = self._json("generation_config.json").get("eos_token_id")
        return eos if isinstance(eos, list) else [eos] if eos is not None else []

    def _json(self, name: str) -> dict[str, Any]:
        """Return the content of a file of the folder. It is empty if there is no such
        file.

        Raises:
            CouplerError: it is not a JSON object.
        """
        path = self.folder / name

        try:
            return read_json(path) if path.is_file() else {}
        except DamagedFile as error:
            raise CouplerError(f"{error}\n  try:  saving the model again") from None


def messages_of(prompt: str | Messages, system_prompt: str) -> Messages:
    """Return a prompt as messages, after the system prompt where there is one.

    Raises:
        CouplerError: the prompt has a system message, too.
    """
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt

    if not system_prompt:
        return tuple(messages)
    if messages[0]["role"] == "system":
        raise CouplerError("it has a system message of its own.\n  try:  data.system_prompt=''")
    return ({"role": "system", "content": system_prompt}, *messages)


def _difference(before: str, after: str, turn: int) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after)
    )
    seen, then = before[max(0, at - 20) : at + 20], after[max(0, at - 20) : at + 20]
    return (
        f"the chat template rewrites earlier turns: at turn {turn}, character {at}, "
        f"{seen!r} becomes {then!r}"
    )
