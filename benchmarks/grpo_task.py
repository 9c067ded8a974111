"""The task of grpo_vs_trl: sums to complete, scored by the form of the answer. Standard
library only.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-*= abcdefghijklmnopq"
PAD, EOS = 0, 1
LONGEST_ANSWER = 3  # characters


def score(completion: str, answer: str, row: dict[str, Any]) -> float:
    """How much it looks like an answer: the share of digits, less where it is longer
    than a sum can be.

    A random model improves it from the first step on, which the right answer's reward
    would not let it do in 20 steps.
    """
    length = max(len(completion), 1)
    return (
        sum(character.isdigit() for character in completion)
        / length
        * min(1.0, LONGEST_ANSWER / length)
    )


def write_prompts(path: Path, num_rows: int = 4096) -> None:
    """Write sums of 2 to 4 numbers."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            numbers = [rng.randrange(1, 100) for _ in range(rng.randrange(2, 5))]
            row = {"prompt": "+".join(map(str, numbers)) + "=", "answer": str(sum(numbers))}
            file.write(json.dumps(row) + "\n")
