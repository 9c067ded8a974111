"""Compare the mathematics of a completion with the answer of the row: math-verify."""

from __future__ import annotations

import logging
import re

from coupler.rewards.result import Graded, Invalid
from coupler.system.imports import present

BROUGHT_BY = "coupler-core[math]"
# The answer is looked for in so many of the last characters.
MAX_TEXT = 4000
# An answer that is one number, and signs of one that is a text with a formula.
NUMBER = re.compile(r"\s*[-+]?(\d{1,3}(,\d{3})+|\d*)(\.\d+)?(/\d+)?\s*%?\s*")
TEXT = re.compile(r"\$|\\[(\[]|[A-Za-z]{2}")
# Commands of a formula, with a word where they take one.
COMMAND = re.compile(r"\\(?!boxed)[A-Za-z]+\s*(\{[A-Za-z .,]*\})?")


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
        gold = self._gold(answer)
        if not gold:
            return Invalid(f"math-verify reads no mathematics in the answer {answer[:100]!r}")

        found = self._read(completion[-MAX_TEXT:])
        same = bool(found) and self.verify(gold, found, timeout_seconds=0)
        return Graded(float(same), str(found[-1]) if found else "")

    def _gold(self, answer: str) -> list[object]:
        r"""Return what the answer of a row holds.

        One that is a formula is read as one: in a text, ``2\sqrt{3}`` is the number 2.
        """
        forms = [answer, f"${answer}$"]
        if not NUMBER.fullmatch(answer) and not TEXT.search(COMMAND.sub(" ", answer)):
            forms.reverse()
        return self._read(forms[0]) or self._read(forms[1])

    def _read(self, text: str) -> list[object]:
        """Return what a text holds: expressions, and last the text of the match."""
        return self.parse(text, parsing_timeout=0)
