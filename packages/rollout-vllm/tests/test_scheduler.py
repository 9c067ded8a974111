"""The outputs of a request's steps, which go to the rollout as one."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from coupler_rollout_vllm.compat.engine import kept_of, logprobs_of
from coupler_rollout_vllm.scheduler import Gathered


def step(token: int, logprob: float, others: dict[int, float]) -> EngineCoreOutput:
    """One token, and other ids with their log-probs."""
    ids = np.array([[token, *others]], np.int32)
    values = np.array([[logprob, *others.values()]], np.float32)
    return EngineCoreOutput("one", [token], LogprobsLists(ids, values, np.ones(1, np.int32)))


# A step is as wide as the widest request in it.
ALONE = [step(5, -0.5, {}), step(6, -0.25, {})]
WIDE = [step(7, -1.5, {7: -1.5, 8: -2.0}), step(8, -0.125, {8: -0.125, 9: -np.inf})]


@pytest.mark.parametrize(
    "steps",
    [ALONE, WIDE, ALONE + WIDE, WIDE + ALONE, ALONE + WIDE + ALONE],
    ids=["alone", "wide", "wide-last", "alone-last", "wide-between"],
)
def test_every_token_keeps_its_log_probs(steps: list[EngineCoreOutput]) -> None:
    tokens = [one.new_token_ids[0] for one in steps]
    before = [one.new_logprobs for one in steps]
    gathered = Gathered()
    for one in steps:
        gathered.add(EngineCoreOutput("one", list(one.new_token_ids), one.new_logprobs))
    joined = gathered.joined()

    assert gathered.steps == len(steps)
    assert joined.new_token_ids == tokens
    assert logprobs_of(joined) == [one.logprobs[0, 0] for one in before]
    kept = [sorted(set(row[row >= 0].tolist())) for row in kept_of(joined)]
    possible = [one.logprob_token_ids[:, 1:][np.isfinite(one.logprobs[:, 1:])] for one in before]
    assert kept == [sorted(set(ids.tolist())) for ids in possible]
