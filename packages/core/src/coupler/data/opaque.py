"""Find out what a chat template reads of the texts that it writes.

A template that writes a text as it is, and reads nothing of it, writes the same around
any other text. One that asks a text a question, or trims it, writes the same around any
text that answers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from coupler.data.traced import Traced

FIRST_MARK = 0x100  # the mark of the first text, apart from those of traced text
QUESTIONS = {
    "startswith": str.startswith,
    "endswith": str.endswith,
    "__contains__": str.__contains__,
    "__eq__": str.__eq__,
    "__ne__": str.__ne__,
    "__bool__": bool,
}
TRIMS = {
    "strip": str.strip,
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
}
# filters that may be given a text, since they read it by its own methods alone
FILTERS = frozenset({"trim", "string", "default", "d"})
OPEN = frozenset(
    {
        "__add__",
        "__class__",
        "__radd__",
        "__str__",
        "marks",
        "number",
        "watch",
        *(name for name in (*QUESTIONS, *TRIMS) if not name.startswith("_")),
    }
)
READS = """
    bytes complex float format ge getitem gt hash index int iter le len lt mod mul repr
    reversed rmod rmul
"""


class Looked(Exception):
    """A template read a text in a way that cannot be done again with another one."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something that a template did with a text.

    Attributes:
        source: the number of the text.
        answer: what it found, or None where it made a further text.
    """

    source: int
    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    answer: bool | None


class Watch:
    """Keep what one rendering does with some texts.

    Attributes:
        texts: the texts, by their numbers.
        steps: what was done with them, in order.
        looked: whether one was read otherwise. The steps are not all then.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.steps: list[Step] = []
        self.looked = False

    def text(self, text: str) -> Opaque:
        """Return a text that is watched, with a mark of its own."""
        number = len(self.texts)
        self.texts.append(text)
        return Opaque(text, chr(FIRST_MARK + number) * len(text), self, number)

    def sum(self, made: Traced) -> Opaque:
        """Return a sum of texts, of which none is asked anything any more."""
        return Opaque(made, made.marks, self)

    def ask(self, text: Opaque, operation: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Do something with a text, and keep it as a step.

        Raises:
            Looked: the text is a sum of several, or an argument is watched, too.
        """
        if text.number is None or not all(map(_is_constant, arguments)):
            self.look()
        plain = tuple(map(_plain, arguments))
        found = operation(str.__str__(text), *plain)

        answer = None if isinstance(found, str) else found
        self.steps.append(
            Step(
                text.number,
                operation,
                plain,
                answer,
            )
        )
        return self.text(found) if answer is None else found

    def look(self) -> NoReturn:
        """Note that a text was read. A template may catch the error, and not the note.

        Raises:
            Looked: always.
        """
        self.looked = True
        raise Looked("a text was read")


class Opaque(Traced):
    """A text of a message that can be written. Whatever else is done with it, its watch
    is told.

    Attributes:
        number: its number, or None for a sum of texts.
    """

    watch: Watch
    number: int | None

    def __new__(cls, text: str, marks: str, watch: Watch, number: int | None = None) -> Self:
        made = super().__new__(cls, text, marks)
        made.watch, made.number = watch, number
        return made

    def __getattribute__(self, name: str) -> Any:
        if name not in OPEN:
            str.__getattribute__(self, "watch").look()
        return str.__getattribute__(self, name)


def _asking(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    def ask(text: Opaque, *arguments: Any) -> Any:
        if name in ("__eq__", "__ne__") and not isinstance(arguments[0], str):
            return NotImplemented  # the type alone says that they differ
        return text.watch.ask(text, operation, arguments)

    return ask


def _look(text: Opaque, *_: Any) -> NoReturn:
    text.watch.look()


for _name, _operation in (QUESTIONS | TRIMS).items():
    setattr(Opaque, _name, _asking(_name, _operation))
for _name in READS.split():
    setattr(Opaque, f"__{_name}__", _look)


def look(values: Iterable[Any]) -> None:
    """Tell the watch of each of ``values`` that it is read, also within others.

    Raises:
        Looked: there is such a text.
    """
    for value in values:
        if isinstance(value, Opaque):
            value.watch.look()
        elif isinstance(value, Mapping):
            look(value)
            look(value.values())
        elif isinstance(value, list | tuple):
            look(value)


def replay(steps: Sequence[Step], texts: Sequence[str]) -> list[str] | None:
    """Do with other texts what was done with those of a watch.

    Returns:
        The texts and those that were made of them, or None where one answers otherwise.
    """
    found = list(texts)
    for step in steps:
        answer = step.operation(found[step.source], *step.arguments)
        if step.answer is None:
            found.append(answer)
        elif answer is not step.answer:
            return None
    return found


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or (isinstance(value, str | int) and not isinstance(value, Opaque))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return str.__str__(value) if isinstance(value, str) else value
