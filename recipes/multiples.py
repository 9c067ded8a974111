"""Least common multiples with Python as a tool, from the tasks of reasoning-gym."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from coupler.data import reasoning_gym

ASK = "What is the least common multiple of {} and {}? Use Python."
CODE = "import math; math.lcm({}, {})"
CALL = '<tool_call>{{"name": "python", "arguments": {{"code": "{}"}}}}</tool_call>'
# The prompt shows these calls, since so small a model writes none by itself.
SHOWN = ((12, 45), (64, 28))


def rows(size: int, seed: int, **task: Any) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows of ``lcm`` of two numbers behind the shown calls."""
    shown = [message for pair in SHOWN for message in _shown(*pair)]
    for row in reasoning_gym.rows("lcm", size, seed, min_numbers=2, max_numbers=2, **task):
        numbers = row["prompt"].rpartition(": ")[2].split(", ")
        asked = {"role": "user", "content": ASK.format(*numbers)}
        yield {**row, "prompt": [*shown, asked]}


def _shown(one: int, other: int) -> list[dict[str, str]]:
    result = math.lcm(one, other)
    return [
        {"role": "user", "content": ASK.format(one, other)},
        {"role": "assistant", "content": CALL.format(CODE.format(one, other))},
        {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"},
        {"role": "assistant", "content": f"It is {result}."},
    ]
