"""Find an action in what a policy said."""

from __future__ import annotations

import re

from coupler.errors import ConfigError

MAX_CHARACTERS = 20_000  # of a turn in which an action is looked for


class NoAction(Exception):
    """A turn has no action. The policy is told why."""


class ActionPattern:
    """Finds actions by ``environment.action_pattern``.

    Args:
        text: a regular expression. Empty takes the whole turn.

    Raises:
        ConfigError: it is no regular expression.
    """

    def __init__(self, text: str) -> None:
        try:
            self.pattern = re.compile(text, re.DOTALL) if text else None
        except re.error as error:
            raise ConfigError(
                f"environment.action_pattern={text!r} is no regular expression: {error}."
            ) from None

    def find(self, said: str) -> str:
        """Return the first group of the last match, or the match if there is no group.

        Raises:
            NoAction: there is no match.
        """
        said = said[-MAX_CHARACTERS:]
        if not self.pattern:
            return said.strip()

        matches = list(self.pattern.finditer(said))
        if not matches:
            raise NoAction(f"An action is written as {self.pattern.pattern}.")
        found = matches[-1][1 if self.pattern.groups else 0]
        return (found or "").strip()
