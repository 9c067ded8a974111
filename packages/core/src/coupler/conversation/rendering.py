"""Define the renderer: the one that turns messages into the ids of a model and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coupler.batch.trajectory import Segment
from coupler.interfaces import Message


@dataclass(frozen=True, slots=True)
class Parsed:
    """A message that was read out of sampled ids.

    Attributes:
        message: content, and reasoning_content and tool_calls where there are any.
        malformed: the reason why a tool call could not be read. Its text then stays in
            the content.
    """

    message: Message
    malformed: str = ""


class Malformed(Exception):
    """A tool call that cannot be read. The message says why."""


class ReadsCalls(Protocol):
    """Reads tool calls out of sampled text."""

    def read(self, text: str, tools: Sequence[Any]) -> tuple[str, list[tuple[str, Any]]]:
        """Return the text before the calls, and name and arguments of each call.

        Args:
            tools: those that were offered, as OpenAI JSON schemas.

        Raises:
            Malformed: something that began as a call cannot be read.
        """
        ...


class Renderer(Protocol):
    """Turns messages into ids of one model, and sampled ids into a message.

    Text of messages and tools never becomes a control token.
    """

    @property
    def stop(self) -> tuple[int, ...]:
        """Return the ids that end a turn of the policy."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[int, ...]:
        """Encode messages up to where the policy speaks."""
        ...

    def extend(
        self,
        history: Sequence[Message],
        ids: tuple[int, ...],
        new: Sequence[Message],
        tools: Sequence[Any],
    ) -> tuple[Segment, ...] | None:
        """Encode what follows ``ids``, up to where the policy speaks again.

        Args:
            history: the messages that ``ids`` stand for. The last one was sampled.
            ids: everything that the policy was fed and sampled, which stays as it is.
            new: the messages to append.

        Returns:
            Segments of origin ``GLUE`` and ``OBSERVATION``, or None if it is not proved
            that the template would write them.
        """
        ...

    def parse(self, ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Any]) -> Parsed:
        """Read the message that the policy sampled as ``ids`` after ``prompt``."""
        ...
