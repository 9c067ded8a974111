"""Three kinds of rows for one run: sums, differences and products of small numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Any

KINDS = {
    "sums": ("plus", lambda a, b: a + b),
    "differences": ("minus", lambda a, b: a - b),
    "products": ("times", lambda a, b: a * b),
}


def rows(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows whose kinds take turns."""
    random = Random(seed)
    for index in range(size):
        kind = [*KINDS][index % len(KINDS)]
        word, result = KINDS[kind]
        low, high = sorted((random.randint(2, 9), random.randint(2, 9)))
        yield {
            "prompt": f"What is {high} {word} {low}?",
            "answer": f"{high} {word} {low} is {result(high, low)}.",
            "data_source": kind,
        }


def score(completion: str, answer: str) -> float:
    """Return 1 if the last number of a completion is that of the answer."""
    said, right = (re.findall(r"\d+", text)[-1:] for text in (completion, answer))
    return float(said == right)
