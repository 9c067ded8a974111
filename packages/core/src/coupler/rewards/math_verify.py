"""Compare the mathematics of a completion with the answer of the row: math-verify."""

from __future__ import annotations

import logging

from coupler.rewards.result import Graded, Invalid
from coupler.system.imports import present

BROUGHT_BY = "coupler-core[math]"
# The answer is looked for in so many of the last characters.
MAX_TEXT = 4000


class Score:
    r"""Give 1 where the last formula or number of a completion equals the answer.

    What stands in ``\boxed{}`` comes first, then formulas, then numbers. The answer of
    a row may be a number, a formula, or a text with one: ``1/2``, ``\frac12`` and
    ``the half, \boxed{0.5}`` are equal. A row whose answer has none is invalid.

    It runs in a sandbox, unless ``reward.sandbox=off``, and has no limit of time but
    ``reward.timeout_s``, which ends its process.

    Raises:
        CouplerError: math-verify is not installed.
    """

    sandbox = True

    def __init__(self) -> None:
        library = present("math_verify", BROUGHT_BY)
        # It warns of the missing limit at every call.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self.parse, self.verify = library.parse, library.verify
        # What it imports late, a sandbox may not load.
        self(r"\boxed{\frac{1}{2}} or $x^2 = \{1, 2\}$", "0.5")

    def __call__(self, completion: str, answer: str) -> Graded | Invalid:
        gold = self._read(answer) or self._read(f"${answer}$")
        if not gold:
            return Invalid(f"math-verify reads no mathematics in the answer {answer[:100]!r}")

        found = self._read(completion[-MAX_TEXT:])
        same = bool(found) and self.verify(gold, found, timeout_seconds=0)
        return Graded(float(same), str(found[-1]) if found else "")

    def _read(self, text: str) -> list[object]:
        """Return what a text holds: expressions, and last the text of the match."""
        return self.parse(text, parsing_timeout=0)
