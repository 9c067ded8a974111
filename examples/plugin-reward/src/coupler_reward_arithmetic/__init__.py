"""Arithmetic problems, and the reward that verifies an answer to one.

``data.source=coupler_reward_arithmetic:problems
reward.target=coupler_reward_arithmetic:score``
"""

import random
import re
from fractions import Fraction

from coupler.rewards import Graded, Invalid

SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": Fraction}
NUMBER = re.compile(
    r"-?[0-9]{1,12}(?:/[0-9]{1,12}|\.[0-9]{1,12})?"
)  # bounded: a model may write digits forever
TAIL = 200  # Characters at the end of a completion in which its answer is looked for.


def problems(size=1000, seed=0):
    """Yield rows with a prompt and its exact answer."""
    source = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(size):
        a, sign, b = source.randint(-99, 99), source.choice(list(SIGNS)), source.randint(1, 99)
        yield {
            "prompt": f"What is {a} {sign} {b}? End with the number.",
            "answer": str(SIGNS[sign](a, b)),
        }


def score(completion, answer):
    """Return 1 if the last number of the completion equals the answer, 0.1 if it ends
    with another one, else 0.
    """
    right = number_in(answer)
    if right is None:
        return Invalid("the answer of the row is no number")
    found = number_in(completion[-TAIL:])
    if found is None:
        return 0.0
    return Graded(1.0 if found == right else 0.1, str(found))


def number_in(text):
    """Return the last number of a text, exactly; None where there is none."""
    for word in reversed(NUMBER.findall(text)):
        try:
            return Fraction(word)
        except ZeroDivisionError:
            continue
    return None
