"""Render a chat template in a sandbox that bounds its time and memory, and that follows
the text of messages.

The names that a template may use are those of ``apply_chat_template`` of transformers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache, wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from coupler.data.opaque import FILTERS, Opaque, look
from coupler.data.traced import Traced, concat, derived, holds_text, template, trace

MAX_CHARACTERS, CHARACTERS_PER_CHARACTER = 1 << 20, 10
MAX_ROUNDS, MAX_SECONDS = 1_000_000, 60.0  # of all loops of one rendering
MAX_BITS = 256  # of a number
LONG_WIDTH = re.compile(r"\d{5}")  # of a field in a format string


class TooMuch(TemplateError):
    """A template that takes more than the bounds of the sandbox."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for chat templates whose strings are :class:`Traced`.

    Every template is compiled once.
    """

    intercepted_binops = frozenset({"**", "*", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._compile_once = cache(super().from_string)
        self.concat = self._concat
        self.limit, self.rounds, self.end = MAX_CHARACTERS, MAX_ROUNDS, 0.0

        self.filters["tojson"] = _to_json
        for name, function in self.filters.items():
            self.filters[name] = self._tracing(name, function)
        self.filters |= {"_counted": pass_context(_counted), "_concat": pass_context(_joined)}
        self.filters["_container"] = _container
        self.tests["in"] = lambda value, values: value in _container(values)
        self.globals |= {"raise_exception": _raise, "strftime_now": datetime.now().strftime}

    def from_string(self, source: Any, *_: Any, **__: Any) -> Template:
        return self._compile_once(source)

    def render(
        self,
        source: str,
        messages: list[Any],
        follow: Callable[[Any], Any] = trace,
        **names: Any,
    ) -> Traced:
        """Render messages, and return the result with its marks.

        Args:
            follow: makes traced messages of messages.

        Raises:
            TemplateError: the template is wrong, refuses the messages, or takes too
                much.
        """
        self.limit = MAX_CHARACTERS + CHARACTERS_PER_CHARACTER * len(str(messages))
        self.rounds, self.end = MAX_ROUNDS, time.monotonic() + MAX_SECONDS
        try:
            made = self.from_string(source).render(messages=follow(messages), **names)
            return template(made)
        except TemplateError:
            raise
        except RecursionError:
            raise TooMuch("it nests too deeply") from None
        except MemoryError:
            raise TooMuch("it takes too much memory") from None
        except Exception as error:  # a template is a program, and may raise anything
            raise TemplateError(f"{type(error).__name__}: {error}") from None

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Bound the size of a result before it is made."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 0) if operator == "**" else 1)
            self._check(bits + right.bit_length() <= MAX_BITS or operator == "%", "a number")
        elif operator == "*":
            sizes = [len(v) if isinstance(v, str | list | tuple) else v for v in (left, right)]
            self._check(sizes[0] * sizes[1] <= self.limit, "a repetition")
        elif operator == "+" and isinstance(left, str | list | tuple):
            self._check(_length(left) <= self.limit, "a sum")
        elif operator == "%" and isinstance(left, str):
            self._check(not LONG_WIDTH.search(left), "a field")

        made = super().call_binop(context, operator, left, right)
        if type(made) is str and operator == "%":
            return derived(made, [left, right]) if holds_text(right) else made
        return made

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a template, where a method of a string keeps marks."""
        owner = getattr(obj, "__self__", None)
        if not isinstance(owner, str):
            return super().call(context, obj, *args, **kwargs)

        for name in ("_loop_vars", "_block_vars"):  # jinja's own, which it takes out itself
            kwargs.pop(name, None)
        if isinstance(owner, Opaque):
            return super().call(context, obj, *args, **kwargs)
        if obj.__name__ != "join":
            look([*args, *kwargs.values()])
        self._check_arguments(owner, args)
        if obj.__name__ == "replace":
            self._check_replacement(owner, args)
        given = [owner, *args, *kwargs.values()]
        if not holds_text(given):
            return super().call(context, obj, *args, **kwargs)
        if obj.__name__ in vars(Traced):
            return getattr(template(owner), obj.__name__)(*args, **kwargs)
        return _marked(super().call(context, obj, *args, **kwargs), given)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def _concat(self, parts: Iterable[Any]) -> str:
        pieces, size = [], 0
        for part in parts:
            pieces.append(part)
            size += _length(part)
            self._check(size <= self.limit, "the text")
        if any(isinstance(piece, Traced) for piece in pieces):
            return concat(pieces)
        return "".join(pieces)

    def _tracing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            if name not in FILTERS:
                look(value for value in given if isinstance(value, Opaque))
            self._check_arguments("", given)
            texts = [value for value in given if isinstance(value, str)]
            if name == "replace":
                self._check_replacement(texts[0] if texts else "", texts[1:])
            if name == "format" and texts:
                self._check(not LONG_WIDTH.search(texts[0]), "a field")
            if name == "join":  # (eval_context, value, separator)
                args = (*args[:2], *(template(str(value)) for value in args[2:3]), *args[3:])
                if len(args) < 3 and "d" not in kwargs:
                    kwargs["d"] = template("")

            made = function(*args, **kwargs)
            if type(made) is not str or any(made is value for value in given):
                return made
            return derived(made, given) if holds_text(given) else made

        return filtered

    def _check_arguments(self, owner: str, values: Iterable[Any]) -> None:
        wide = any(isinstance(value, int) and abs(value) > self.limit for value in values)
        self._check(not wide and not ("{" in owner and LONG_WIDTH.search(owner)), "a field")

    def _check_replacement(self, text: str, values: Iterable[Any]) -> None:
        old, new = ([value for value in values if isinstance(value, str)] + ["", ""])[:2]
        self._check(text.count(old) * len(new) <= self.limit, "a replacement")

    def _check(self, fits: bool, what: str) -> None:
        if not fits:
            raise TooMuch(f"{what} is too large, the limit is {self.limit} characters")

    def _count(self) -> None:
        self.rounds -= 1
        if self.rounds < 0:
            raise TooMuch(f"its loops take more than {MAX_ROUNDS} rounds")
        if not self.rounds % 1000 and time.monotonic() > self.end:
            raise TooMuch(f"it takes more than {MAX_SECONDS:g} seconds")


class _Bounds(NodeTransformer):
    """Have loops counted, and ``~`` keep marks."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_counted")
        return node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:
        self.generic_visit(node)
        if node.op in ("in", "notin"):
            node.expr = _filter(node.expr, "_container")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")


class _Generation(Extension):
    """The tag ``generation``, which changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(node: Any, name: str) -> Any:
    made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    return made.set_environment(node.environment)


def _length(value: Any) -> int:
    """Return the length also of a text that is watched."""
    return str.__len__(value) if isinstance(value, str) else len(value)


def _container(value: Any) -> Any:
    """Return a value that sees whether a text is looked for in it."""
    return template(value) if isinstance(value, str) else value


def _counted(context: Context, values: Any) -> Iterator[Any]:
    for value in values:
        context.environment._count()  # type: ignore[attr-defined]
        yield value


def _joined(context: Context, values: list[Any]) -> str:
    return context.environment.concat([str(value) for value in values])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _marked(value: Any, given: list[Any]) -> Any:
    """Mark strings as text that was made of ``given``."""
    if type(value) is str:
        return derived(value, given)
    return trace(value) if isinstance(value, list | tuple | Mapping) else value
