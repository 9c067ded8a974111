"""Read JSON of requests with its types checked, and write JSON of responses.

Whatever is wrong in a request raises :class:`Refused` with one sentence.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from coupler.conversation import Reply

MODEL = "policy"
MAX_DEPTH = 64  # levels of lists and objects in a body
MANY_DIGITS = re.compile(rb"[0-9][0-9]{18}")  # orjson reads such whole numbers as floats
SHOWN = 60  # characters of a value in a sentence
Object = dict[str, Any]

# what a request may ask of the sampling, with the values that ask nothing
WISHES: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "min_p": (0,),
    "seed": (),
    "stop": ([],),
    "stop_sequences": ([],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "parallel_tool_calls": (True,),
    "reasoning": ({},),
    "reasoning_effort": (),
    "thinking": ({"type": "disabled"},),
    "verbosity": (),
}
NUMBERS = {name for name in WISHES if name.endswith(("_p", "_penalty"))} | {"temperature"}
NO_CHOICE = ("none", {"type": "none"})


class Refused(Exception):
    """A request that gets no turn. The message is one sentence for its sender."""

    def __init__(self, sentence: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(sentence)
        self.status, self.code = status, code


@dataclass(slots=True)
class Asked:
    """A request for a turn, in the terms of a conversation.

    Attributes:
        body: the request as it came.
        wishes: what it asked of the sampling.
    """

    body: Object
    messages: list[Object]
    tools: list[Object]
    max_tokens: int | None
    stream: bool
    wishes: Object

    @property
    def model(self) -> str:
        """Return the name of the model that the caller used."""
        return text(self.body, "model") or MODEL


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call, with its arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """The parts of a sampled message that dialects write."""

    text: str
    reasoning: str
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, reply: Reply) -> Spoken:
        """Take a reply apart."""
        said = reply.message
        calls = [
            Call(call["id"], call["function"]["name"], arguments(call["function"]["arguments"]))
            for call in said.get("tool_calls") or ()
        ]
        return cls(said.get("content") or "", said.get("reasoning_content") or "", calls)


def arguments(value: Any) -> str:
    """Return arguments of a tool call as JSON text that any client can send back."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        value.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(value))
    return value


def load(raw: bytes) -> Object:
    """Parse the body of a request.

    Raises:
        Refused: it is no JSON object, or nests too deep.
    """
    try:
        body = json.loads(raw) if MANY_DIGITS.search(raw) else orjson.loads(raw)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise Refused(f"the body is not JSON: {str(error)[:SHOWN]}.") from None

    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object, and it is {kind(body)}.")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(body)
    return body


def dump(value: Any) -> bytes:
    """Return a value as JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # whole numbers above 64 bits, and halves of surrogate pairs
        return json.dumps(value).encode()


def frame(value: Any, event: str = "") -> bytes:
    """Return one server-sent event."""
    head = b"event: " + event.encode() + b"\n" if event else b""
    return head + b"data: " + dump(value) + b"\n\n"


def new_id(prefix: str) -> str:
    """Return an id that no other object has."""
    return prefix + secrets.token_hex(12)


def kind(value: Any) -> str:
    """Name the JSON type of a value."""
    if value is None:
        return "null"
    names = {bool: "a truth value", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def text(body: Mapping[str, Any], name: str, default: str = "") -> str:
    """Return a field that must be a text, or the default where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a field that must be true or false. Absent is false."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def whole(body: Mapping[str, Any], name: str) -> int | None:
    """Return a field that must be a whole number of at least 1, or None."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, "a whole number of at least 1", value)
    return value


def member(body: Mapping[str, Any], name: str) -> Object:
    """Return a field that must be an object. Absent is an empty one."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    return value


def members(body: Mapping[str, Any], name: str) -> list[Object]:
    """Return a field that must be a list of objects. Absent is an empty one."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(name, "a list of objects", value)
    for number, each in enumerate(value):
        if not isinstance(each, dict):
            raise _wrong(f"{name}[{number}]", "an object", each)
    return value


def refuse(body: Mapping[str, Any], names: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that ask for what the gateway cannot do.

    Args:
        names: the fields, with the values that ask nothing. None and empty ones never
            do.

    Raises:
        Refused: a field has another value.
    """
    if names.keys().isdisjoint(body):
        return
    for name, harmless in names.items():
        value = body.get(name)
        if value and value not in harmless:
            raise Refused(
                f"{name}={shown(value)} is not supported: the gateway samples one text answer "
                "as the run is configured. Leave it out.",
                code="unsupported",
            )


def wishes(body: Mapping[str, Any], **more: Any) -> Object:
    """Return what a request asks of the sampling, which the conversation overrules and
    counts.
    """
    found: Object = {name: value for name, value in more.items() if value is not None}
    for name in WISHES.keys() & body.keys():
        value = body[name]
        if value is None or any(value == other for other in WISHES[name]):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in NUMBERS and not number:
            raise _wrong(name, "a number", value)
        found[name] = value
    return found


def tool(body: Mapping[str, Any], place: str, schema: str) -> Object:
    """Return a tool in the one shape that the policy sees in every dialect.

    Args:
        body: an object with name, description and a schema.
        place: its place in the request, for the sentence.
        schema: the name of the field that holds the schema of its arguments.

    Raises:
        Refused: it has no name.
    """
    function: Object = {"name": text(body, "name")}
    if not function["name"]:
        raise Refused(f"{place} has no name. Set it to the name of a function.")
    if about := text(body, "description"):
        function["description"] = about
    if body.get(schema) is not None:
        function["parameters"] = member(body, schema)
    return {"type": "function", "function": function}


def joined(value: Any, place: str, kinds: tuple[str, ...], between: str = "") -> str:
    """Return the text of content: a text, or a list of parts of some types.

    Raises:
        Refused: it holds something else, an image for example.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise _wrong(place, "a text or a list of parts", value)

    found: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            named = shown(part.get("type")) if isinstance(part, dict) else kind(part)
            raise Refused(
                f"{place} has a part of type {named}, and the policy reads text alone. "
                f"Send parts of type {kinds[0]}.",
                code="unsupported",
            )
        found.append(text(part, "refusal" if part["type"] == "refusal" else "text"))
    return between.join(found)


def shown(value: Any) -> str:
    """Return a short form of a value for a sentence."""
    return json.dumps(value)[:SHOWN]


def _wrong(name: str, wanted: str, value: Any) -> Refused:
    return Refused(f"{name} must be {wanted}, and it is {kind(value)}: {shown(value)}.")


def _too_deep() -> Refused:
    return Refused(f"the body nests deeper than {MAX_DEPTH} levels.")


def _check_depth(body: Object) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [each for value in level for each in _inner(value)]
    if level:
        raise _too_deep()


def _inner(value: Any) -> Iterator[Any]:
    held = value.values() if isinstance(value, dict) else value
    return (each for each in held if isinstance(each, dict | list))
