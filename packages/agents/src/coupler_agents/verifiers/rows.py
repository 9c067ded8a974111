"""Write the tasks of a taskset as rows.

``python -m coupler_agents.verifiers.rows '{"taskset": {"id": "my_tasks"}}'`` prints a
row for each task, as JSON lines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from coupler_agents.verifiers.config import VerifiersConfig
from coupler_agents.verifiers.environment import COLUMN, VerifiersEnvironment

OPENED = "(the user begins)"


def rows(env: dict[str, Any], most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each task.

    Args:
        env: the environment, as ``environment.env`` has it.
        most: the number of rows, all without it. A taskset may have no end.
    """
    taskset = VerifiersEnvironment(VerifiersConfig(env=env)).env.taskset
    for task in islice(taskset, most):
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        prompt = task.data.prompt_text or OPENED
        yield {
            "prompt": prompt,
            "answer": "",
            COLUMN: data,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", type=json.loads, help="environment.env as JSON")
    parser.add_argument("--most", type=int, default=None, help="the number of rows")
    given = parser.parse_args(arguments)

    for row in rows(given.env, given.most):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
