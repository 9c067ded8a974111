"""Sums with a calculator as a tool, from the tasks of reasoning-gym."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from coupler.data import reasoning_gym

# The prompt shows two calls, since so small a model writes none by itself.
SHOWN = {"What is 25 + 317?": "25 + 317", "Compute 90 - 4 + 55.": "90 - 4 + 55"}
CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'


def calculator(expression: str) -> str:
    """Compute a sum.

    Args:
        expression: Whole numbers with + and - between them.
    """
    if not re.fullmatch(r"[\d\s+-]{1,200}", expression):
        raise ValueError("write whole numbers with + and - between them")
    numbers = re.findall(r"[+-]?\d+", re.sub(r"\s", "", expression))
    return str(sum(map(int, numbers)))


def rows(size: int, seed: int, **task: Any) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows of ``chain_sum`` behind the shown calls."""
    shown = [message for ask, text in SHOWN.items() for message in _shown(ask, text)]
    for row in reasoning_gym.rows("chain_sum", size, seed, **task):
        asked = {"role": "user", "content": row["prompt"]}
        yield {**row, "prompt": [*shown, asked]}


def _shown(ask: str, expression: str) -> list[dict[str, str]]:
    result = calculator(expression)
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": CALL.format(expression)},
        {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"},
        {"role": "assistant", "content": result},
    ]
