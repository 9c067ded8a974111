"""Read the action that a policy said, as the space of an environment has it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gymnasium import Env, spaces

from coupler import CouplerError
from coupler_agents.pattern import ActionPattern, NoAction

NUMBER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


class Reader:
    """Reads actions for environments of one kind.

    Args:
        pattern: finds the action in a turn. Empty takes the whole turn.
        names: those of the actions of a ``Discrete`` space.

    Raises:
        ConfigError: the pattern is no regular expression.
    """

    def __init__(self, pattern: str, names: Sequence[str]) -> None:
        self.pattern = ActionPattern(pattern)
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
        said = self.pattern.find(text)
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
