"""Read the action that a policy said, as the space of an environment has it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gymnasium import Env, spaces

from coupler import CouplerError
from coupler.errors import ConfigError

MAX_CHARACTERS = 20_000  # of a turn in which an action is looked for
NUMBER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


class NoAction(Exception):
    """A turn has no action of the space. The policy is told why."""


class Reader:
    """Reads actions for environments of one kind.

    Args:
        pattern: finds the action in a turn. Empty takes the whole turn.
        names: those of the actions of a ``Discrete`` space.

    Raises:
        ConfigError: the pattern is no regular expression.
    """

    def __init__(self, pattern: str, names: Sequence[str]) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL) if pattern else None
        except re.error as error:
            raise ConfigError(
                f"environment.action_pattern={pattern!r} is no regular expression: {error}."
            ) from None
        self.names = {name.strip().lower(): i for i, name in enumerate(names)}
        self.listed = ", ".join(names)

    def check(self, env: Env[Any, Any]) -> None:
        """Check that a text can be an action of an environment.

        Raises:
            CouplerError: it can be none.
        """
        space = env.action_space
        if isinstance(space, spaces.Text) and not self.names:
            return

        if not isinstance(space, spaces.Discrete):
            raise CouplerError(
                f"environment=gymnasium: the actions of {env} are {space}, and a policy says "
                "an action of a Discrete or a Text space.\n"
                "  do:  wrap it with gymnasium.ActionWrapper"
            )
        if self.names and len(self.names) != space.n:
            raise CouplerError(
                f"environment.actions has {len(self.names)} different names, and the actions of "
                f"{env} are {space}."
            )

    def read(self, text: str, space: Any) -> Any:
        """Return the action that a turn has.

        Raises:
            NoAction: it has none.
        """
        said = self._found(text[-MAX_CHARACTERS:]).strip()
        if isinstance(space, spaces.Text):
            if not space.contains(said):
                raise NoAction(
                    f"An action has {space.min_length} to {space.max_length} characters, of "
                    f"{''.join(sorted(space.character_set))!r}."
                )
            return said

        if self.names:
            if said.lower() not in self.names:
                raise NoAction(f"The actions are: {self.listed}.")
            return int(space.start) + self.names[said.lower()]
        if not NUMBER.fullmatch(said) or not space.contains(int(said)):
            first = int(space.start)
            raise NoAction(f"An action is a number from {first} to {first + int(space.n) - 1}.")
        return int(said)

    def _found(self, text: str) -> str:
        if not self.pattern:
            return text
        matches = list(self.pattern.finditer(text))
        if not matches:
            raise NoAction(f"An action is written as {self.pattern.pattern}.")
        return matches[-1][1 if self.pattern.groups else 0] or ""
