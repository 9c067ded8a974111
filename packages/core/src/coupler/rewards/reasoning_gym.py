"""Verifiers of reasoning-gym, for rows of ``coupler.data.reasoning_gym:rows``."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from coupler.data.reasoning_gym import create, library
from coupler.rewards.result import Graded

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Score:
    """The task's own score of the text in the last ``<answer>`` tags, or of all of it where there are none.

    Most tasks give partial credit, in part for no merit: chain_sum scores a wrong sentence by the share that the right
    number has in it, countdown gives 0.01 for a wrong answer. Read the task's verifier before you train on this.
    """

    def __init__(self) -> None:
        library()  # at the start of a worker: the first call must not pay for the import

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Graded:
        tagged = ANSWER.findall(completion)
        text = (tagged[-1] if tagged else completion).strip()
        verifier = _verifier(row["task"], json.dumps(row["task_config"]))
        return Graded(float(verifier.score_answer(text, _entry(row["entry"]))), text)


class Exact(Score):
    """1 for a full score, else 0."""

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Graded:
        graded = super().__call__(completion, row)
        return Graded(float(graded.reward == 1.0), graded.answer)


class LastNumber(Exact):
    """1 if the last number that the text names is the answer, else 0: for arithmetic, however it is worded."""

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Graded:
        numbers = NUMBER.findall(completion)
        return super().__call__(numbers[-1], row) if numbers else Graded(0.0, "")


@lru_cache(8)
def _verifier(task: str, task_config: str) -> Any:
    return create(task, {"size": 1, "seed": 0, **json.loads(task_config)})


@lru_cache(256)
def _entry(literal: str) -> dict[str, Any]:
    return ast.literal_eval(literal)
