"""The tasks of benchmarks: sums to complete, scored by the form of the answer, and a
share of digits. Standard library only.
"""

from __future__ import annotations

import json
import os
import random
import time
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
    return share_of_digits(completion) * min(1.0, LONGEST_ANSWER / max(len(completion), 1))


def digits(completion: str, answer: str, row: dict[str, Any]) -> float:
    """The share of digits, which a random model learns to raise at any length.

    The time goes to the file that the environment variable SCORED_AT names.
    """
    with Path(os.environ["SCORED_AT"]).open("a") as file:
        file.write(f"{time.time()}\n")
    return share_of_digits(completion)


def share_of_digits(completion: str) -> float:
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def write_prompts(path: Path, num_rows: int = 4096) -> None:
    """Write sums of 2 to 4 numbers."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            numbers = [rng.randrange(1, 100) for _ in range(rng.randrange(2, 5))]
            row = {"prompt": "+".join(map(str, numbers)) + "=", "answer": str(sum(numbers))}
            file.write(json.dumps(row) + "\n")
