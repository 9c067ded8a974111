"""Sums with a calculator as a tool, from the tasks of reasoning-gym."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from coupler.data import reasoning_gym

ASK = "{} Use the calculator."
CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
# The prompt shows these calls, since so small a model writes none by itself.
SHOWN = ("25 + 317 - 90", "404 - 61 + 8")


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
    shown = [message for expression in SHOWN for message in _shown(expression)]
    for row in reasoning_gym.rows("chain_sum", size, seed, **task):
        sums = row["prompt"].rpartition(": ")[2].rstrip(" =")
        asked = {"role": "user", "content": ASK.format(f"What is {sums}?")}
        yield {**row, "prompt": [*shown, asked]}


def _shown(expression: str) -> list[dict[str, str]]:
    result = calculator(expression)
    return [
        {"role": "user", "content": ASK.format(f"What is {expression}?")},
        {"role": "assistant", "content": CALL.format(expression)},
        {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"},
        {"role": "assistant", "content": f"It is {result}."},
    ]
