"""Bound a conversation."""

from __future__ import annotations

from dataclasses import dataclass, fields

from coupler.errors import ConfigError, CouplerError
from coupler.interfaces import Ended


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one episode. 0 sets none.

    Attributes:
        turns: sampled turns, of all branches.
        tokens: a prompt together with its completion.
        completion_tokens: sampled tokens of one turn, at least 1.
        calls: tool calls, of all turns.
        seconds: from the start of the conversation.

    Raises:
        ConfigError: a limit is negative, or a turn may have no token.
    """

    completion_tokens: int
    turns: int = 0
    tokens: int = 0
    calls: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name == "completion_tokens")
            if not value >= least:
                raise ConfigError(
                    f"limits.{field.name}={value} of a conversation must be at least {least}.\n"
                    f"  set:  limits.{field.name} to "
                    + ("the tokens of a turn" if least else "0 for no limit, or more")
                )


class ConversationOver(CouplerError):
    """A request came to a conversation that has ended."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(f"the conversation has ended (reason: {ended}).")
        self.ended = ended
