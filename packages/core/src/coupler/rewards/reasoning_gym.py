"""Verifiers of reasoning-gym, for rows of ``coupler.data.reasoning_gym:rows``."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from coupler.data.reasoning_gym import create

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(completion: str, row: Mapping[str, Any]) -> float:
    """Return the task's own score of the text in the last ``<answer>`` tags, or of all of it where there are none.

    Most tasks give partial credit, in part for no merit: chain_sum scores a wrong sentence by the share that the right
    number has in it, countdown gives 0.01 for a wrong answer. Read the task's verifier before you train on this.
    """
    tagged = ANSWER.findall(completion)
    text = (tagged[-1] if tagged else completion).strip()
    return float(_verifier(row["task"], json.dumps(row["task_config"])).score_answer(text, _entry(row["entry"])))


def exact(completion: str, row: Mapping[str, Any]) -> float:
    """Return 1 for a full score, else 0."""
    return float(score(completion, row) == 1.0)


@lru_cache(8)
def _verifier(task: str, task_config: str) -> Any:
    return create(task, {"size": 1, "seed": 0, **json.loads(task_config)})


@lru_cache(256)
def _entry(literal: str) -> dict[str, Any]:
    return ast.literal_eval(literal)
