def score(completion: str, answer: str) -> float:
    """Return the share of the answer's letters that the completion has, so that groups
    differ.
    """
    return sum(letter in completion for letter in answer) / max(len(answer), 1)
