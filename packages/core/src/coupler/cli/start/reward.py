"""Score an answer: the function that ``recipe.yaml`` names."""

import re


def score(completion: str, answer: str) -> float:
    """Return 1 if the last number of the completion is the answer, 0.1 for another
    number, else 0.
    """
    numbers = re.findall(r"-?\d+", completion)
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1] == answer else 0.1
