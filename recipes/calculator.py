"""Sums of reasoning-gym with a calculator, and a demonstration of how to call it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from coupler.data import reasoning_gym


def calculator(expression: str) -> str:
    """Compute a sum.

    Args:
        expression: Numbers with + and - between them.
    """
    return str(sum(int(part) for part in expression.replace("-", "+-").split("+") if part.strip()))


def rows(**task: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task of sums, each behind two sums that are done already.

    Args:
        task: the arguments of ``coupler.data.reasoning_gym:rows``.
    """
    for row in reasoning_gym.rows(**task):
        asked = {"role": "user", "content": row["prompt"]}
        yield {**row, "prompt": [*_shown("31 + 46 - 12", 65), *_shown("58 - 23 + 40", 75), asked]}


def _shown(expression: str, result: int) -> list[dict[str, str]]:
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    question = f"State the final answer to the following arithmetic problem: {expression} ="
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"},
        {"role": "assistant", "content": str(result)},
    ]
