"""Follow text through a chat template: which characters of its result came from a
message, and which from the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, SupportsIndex

TEXT, TEMPLATE = "1", "0"
# of the two marks that are by far the most, and of any other
RUN = re.compile(rf"{TEXT}+|{TEMPLATE}+|(.)\1*", re.DOTALL)
# Roles that templates may write inside of a control token. Any other role is text.
ROLES = frozenset(
    {
        "system", "user", "assistant", "tool", "developer", "function", "model", "ipython",
        "observation",
    }
)  # fmt: skip


class Traced(str):
    """A string with a mark for each character: :data:`TEXT` or :data:`TEMPLATE`.

    The methods that templates use keep the marks of each character. What the others
    return has none, and is marked as text by the sandbox.
    """

    marks: str
    # told of what is done with the text, see :class:`coupler.data.opaque.Opaque`
    watch: Any = None

    def __new__(cls, text: str, marks: str = "") -> Self:
        made = super().__new__(cls, text)
        made.marks = marks or getattr(text, "marks", TEXT * len(text))
        return made

    def __str__(self) -> Traced:
        return self

    def __iter__(self) -> Iterator[Traced]:
        return (self[i] for i in range(len(self)))

    def __contains__(self, part: object) -> bool:
        if isinstance(part, Traced) and part.watch:
            part.watch.look()
        return super().__contains__(part)  # type: ignore[operator]

    def __getitem__(self, key: SupportsIndex | slice) -> Traced:
        return _traced(super().__getitem__(key), self.marks[key])

    def __add__(self, other: str) -> Traced:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Traced:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Traced:
        return _traced(super().__mul__(times), self.marks * times)

    def __rmul__(self, times: SupportsIndex) -> Traced:
        return self * times

    def lstrip(self, chars: str | None = None, /) -> Traced:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Traced:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> Traced:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Traced:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        return self._pieces(super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        return self._pieces(super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[Traced]:  # type: ignore[override]
        return [
            piece if keepends else piece[: len(bare)]
            for piece, bare in zip(
                self._pieces(super().splitlines(True), 0), super().splitlines(), strict=True
            )
        ]

    def partition(self, sep: str, /) -> tuple[Traced, Traced, Traced]:
        return self._parts(self.find(sep), sep)

    def rpartition(self, sep: str, /) -> tuple[Traced, Traced, Traced]:
        at = self.rfind(sep)
        return self._parts(at, sep) if at >= 0 else (self[:0], self[:0], self)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Traced:
        if not old:
            return _traced(super().replace(old, new, count))
        return template(new).join(self.split(old, count))

    def join(self, parts: Iterable[str], /) -> Traced:
        between: list[str] = []
        for part in parts:
            between += [self, part] if between else [part]
        return concat(between)

    def upper(self) -> Traced:
        return self._same_length(super().upper())

    def lower(self) -> Traced:
        return self._same_length(super().lower())

    def title(self) -> Traced:
        return self._same_length(super().title())

    def capitalize(self) -> Traced:
        return self._same_length(super().capitalize())

    def _pieces(self, pieces: list[str], between: int) -> list[Traced]:
        """Return ``pieces``, which stand in this order in the string, with their
        marks.
        """
        found, at = [], 0
        for piece in pieces:
            at = at if between else self.find(piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + between
        return found

    def _parts(self, at: int, sep: str) -> tuple[Traced, Traced, Traced]:
        end = at + len(sep)
        return (self[:at], self[at:end], self[end:]) if at >= 0 else (self, self[:0], self[:0])

    def _same_length(self, changed: str) -> Traced:
        return _traced(changed, self.marks if len(changed) == len(self) else "")


def template(text: str) -> Traced:
    """Return ``text`` as a part of the template, unless it is traced already."""
    return text if isinstance(text, Traced) else _traced(text, TEMPLATE * len(text))


def concat(parts: Iterable[str]) -> Traced:
    """Join strings with their marks. A string without marks is of the template."""
    parts = list(parts)
    marks = [p.marks if isinstance(p, Traced) else TEMPLATE * len(p) for p in parts]
    made = _traced("".join(map(str.__str__, parts)), "".join(marks))

    watched = [p for p in parts if isinstance(p, Traced) and p.watch]
    return watched[0].watch.sum(made) if watched else made


def trace(value: Any, mark: str = TEXT) -> Any:
    """Return a message, or any value of one, with every string in it traced as text.

    A role that is known stays as it is: some templates write ``<|ROLE|>``. A string
    that is traced already keeps its marks.

    Args:
        mark: the character that marks the text. Any but :data:`TEMPLATE` may tell
            messages apart.
    """
    if isinstance(value, str):
        return value if isinstance(value, Traced) else Traced(value, mark * len(value))
    if isinstance(value, Mapping):
        return {
            trace(key, mark): inner if key == "role" and inner in ROLES else trace(inner, mark)
            for key, inner in value.items()
        }
    return [trace(inner, mark) for inner in value] if isinstance(value, list | tuple) else value


def runs(marks: str, start: int = 0) -> Iterator[tuple[str, int]]:
    """Yield each mark that differs from the one before it, and where its run ends."""
    for run in RUN.finditer(marks, start):
        yield run[0][0], run.end()


def holds_text(value: Any) -> bool:
    """Tell whether a value holds a traced string."""
    if isinstance(value, Mapping):
        return any(map(holds_text, value)) or any(map(holds_text, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_text, value))
    return isinstance(value, Traced)


def derived(text: str, values: Any) -> Traced:
    """Mark text that was made of ``values``: as they are, where they have one mark."""
    marks = set(_marks(values)) - {TEMPLATE}
    mark = marks.pop() if len(marks) == 1 else TEXT
    return Traced(text, mark * len(text))


def _marks(value: Any) -> Iterator[str]:
    if isinstance(value, Traced):
        if value.watch:
            value.watch.look()
        yield from set(value.marks)

    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _marks(key)
            yield from _marks(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _marks(inner)


def _traced(text: str, marks: str = "") -> Traced:
    return Traced(text, marks)
