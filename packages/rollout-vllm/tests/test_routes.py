"""Which experts tokens went to, put together from what the scheduler sends; the real
thing is in test_gpu.py.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from coupler.engine_kit.inference.gated import Sampled
from coupler.errors import ConfigError
from coupler.interfaces import Completion, Model, Rank, Request
from coupler_rollout_vllm.arguments import engine_arguments
from coupler_rollout_vllm.client import Running
from coupler_rollout_vllm.config import VLLMConfig

ROUTERS = [1, 2]  # of three layers


def stay(first: int, fed: list[int], tokens: list[int], version: int) -> Running:
    """A stay in the engine whose routes say which row they are of."""

    async def make() -> Running:
        one = Running(asyncio.get_running_loop().create_future(), [(0, version)], ROUTERS)
        start = 0
        for number, token in zip(fed, tokens, strict=True):
            rows = first + np.arange(start, start + number)
            routes = np.stack(
                [
                    np.full((number, 2), 99),
                    np.stack([rows, rows + 1], 1),
                    np.stack([-rows, rows], 1),
                ],
                1,
            )
            logprobs = SimpleNamespace(logprobs=np.array([[-1.0]]))
            one.take(
                SimpleNamespace(
                    new_token_ids=[token],
                    new_logprobs=logprobs,
                    routed_experts=routes,
                    finish_reason=None,
                )
            )
            start += number
        return one

    return asyncio.run(make())


def test_every_token_but_the_last_has_its_routes() -> None:
    done = Sampled()
    done.add(stay(0, [3, 1, 1], [7, 8, 9], version=0))
    found = done.completion(Request((4, 5, 6), 3, routed_experts=True), "length")
    assert found.routed_experts.shape == (6, 2, 2)
    np.testing.assert_array_equal(found.routed_experts[:, 0, 0], [0, 1, 2, 3, 4, -1])
    np.testing.assert_array_equal(found.routed_experts[:5, 1, 0], [0, -1, -2, -3, -4])


def test_what_was_sampled_before_an_update_keeps_its_routes() -> None:
    done = Sampled()
    done.add(stay(0, [3, 1], [7, 8], version=0))
    done.add(stay(100, [5, 1], [9, 10], version=1))
    found: Completion = done.completion(Request((4, 5, 6), 4, routed_experts=True), "length")
    assert (found.tokens, found.versions) == ((7, 8, 9, 10), (0, 0, 1, 1))
    np.testing.assert_array_equal(found.routed_experts[:, 0, 0], [0, 1, 2, 3, 104, 105, -1])


def test_nobody_asked() -> None:
    done = Sampled()
    done.add(stay(0, [3], [7], version=0))
    assert done.completion(Request((4, 5, 6), 1), "length").routed_experts is None


def test_the_cpu_build_records_none() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.routed_experts=true needs a GPU"):
        engine_arguments(VLLMConfig(routed_experts=True), Model("/m"), Rank())
