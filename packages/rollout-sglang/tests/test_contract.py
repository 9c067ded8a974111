"""What inference engines do differently from each other, and a rollout may not: one
behaviour for each case.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Completion, InFlight, Memory, Request
from coupler.testing.edge import Served
from coupler.testing.reference import TransformersReference
from coupler_rollout_sglang import messages
from coupler_rollout_sglang.arguments import CPU_CACHE_GIB, GIB, bytes_per_token, text_config
from coupler_rollout_sglang.completions import sampling_of

POSITIONS = 256  # of the model


def generate(served: Served, *requests: Request) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*map(served.rollout.generate, requests))

    return served.run(together)


def push(served: Served, reference: TransformersReference, **changed: np.ndarray) -> Any:
    tensors = {**reference.tensors, **changed}
    return served.push((name, torch.from_numpy(tensor)) for name, tensor in tensors.items())


def error(reference: TransformersReference, request: Request, done: Completion) -> float:
    want = reference.logprobs_of(request.prompt, done.tokens, request.temperature or 1.0)
    return float(np.abs(want - done.logprobs).max())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((7,) * POSITIONS, 1), "a prompt has 256 tokens; this rollout takes 1 to 255"),
        (Request((), 1), "a prompt has 0 tokens"),
        (Request((7,), 0), "wants 0 tokens"),
        (Request((7, 320), 1), "the model knows 0 to 319"),
        (Request((7,), 1, temperature=-1.0), "sampling.temperature must be at least 0"),
    ],
)
def test_malformed_requests_are_refused_before_the_engine(
    served: Served, request_: Request, message: str
) -> None:
    with pytest.raises(CouplerError, match=message):
        generate(served, request_)


@pytest.mark.parametrize("temperature", [0.0, 0.001, 0.3, 1.0, 5.0])
def test_logprobs_are_exact_at_every_temperature(
    served: Served, reference: TransformersReference, temperature: float
) -> None:
    """All rows greedy, or some: SGLang's own sampler has a path for each."""
    greedy = [Request((5, 6 + i), 6, temperature, seed=i) for i in range(3)]
    mixed = [*greedy, Request((9, 9), 6, 0.7, seed=1), Request((9, 8), 6, 0.0)]
    for requests in (greedy, mixed):
        done = generate(served, *requests)
        limit = 1e-3 / min(temperature or 1.0, 1.0)
        assert max(error(reference, r, d) for r, d in zip(requests, done, strict=True)) < limit


@pytest.mark.parametrize("lacking", ["output_token_logprobs", messages.VERSION_KEY])
def test_numbers_that_do_not_match_the_tokens_are_an_error(lacking: str) -> None:
    """Not an empty completion, and not an index error three calls later."""
    meta = {
        "output_token_logprobs": [(-0.5, 1, None), (-0.5, 2, None)],
        messages.VERSION_KEY: [3, 3],
        "finish_reason": {"type": "length"},
    }
    output = {"output_ids": [1, 2], "meta_info": meta}
    assert sampling_of(output, prompt=3)[0].versions == [3, 3]
    meta[lacking] = meta[lacking][:1]
    with pytest.raises(CouplerError, match=r"SGLang returned 1 .* of 2 tokens"):
        sampling_of(output, prompt=3)


def test_nothing_happens_under_running_requests(served: Served) -> None:
    async def story() -> None:
        running = asyncio.ensure_future(served.rollout.generate(Request((5, 6), 200)))
        while not served.rollout.running:
            await asyncio.sleep(0.001)
        with pytest.raises(
            CouplerError, match=r"(?s)1 requests are being sampled.*pause\(\) before sleep"
        ):
            await served.rollout.sleep(frozenset(Memory))
        with pytest.raises(
            WeightSyncError, match=r"(?s)1 requests are being sampled.*pause\(\) before update"
        ):
            await served.rollout.update(None)  # type: ignore[arg-type]
        await running

    served.run(story)


def test_a_prefix_of_older_weights_is_never_read(
    served: Served, reference: TransformersReference
) -> None:
    """Also not while requests are frozen, when SGLang cannot empty its cache."""
    long = tuple(range(10, 74))
    request, other = Request(long, 6, seed=4), Request((*long, 80), 6, seed=5)
    generate(served, request)
    changed = {
        name: 1.5 * tensor
        for name, tensor in reference.tensors.items()
        if "k_proj" in name or "v_proj" in name
    }
    push(served, reference, **changed)
    assert error(reference, request, generate(served, request)[0]) > 1e-2

    async def frozen() -> Completion:
        rollout = served.rollout
        running = asyncio.ensure_future(rollout.generate(Request((5, 6), 200, seed=1)))
        while not rollout.running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        await rollout.pause(InFlight.STALE_KV)
        await served.edge.push(
            (name, torch.from_numpy(tensor)) for name, tensor in reference.tensors.items()
        )
        await rollout.resume()
        found = await rollout.generate(other)
        assert len((await running).tokens) == 200
        return found

    assert error(reference, other, served.run(frozen)) < 1e-3


def test_a_part_of_a_fused_parameter_is_missed_by_name(
    served: Served, reference: TransformersReference
) -> None:
    """q, k and v are one parameter in the engine: loaded, as far as it knows, with one
    of them.
    """
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors = {n: torch.from_numpy(t) for n, t in reference.tensors.items() if n != name}
    _, receipt = served.push(tensors.items())
    assert receipt.missing == (name,)
    assert receipt.num_loaded == receipt.num_received == len(tensors)
    push(served, reference)


def test_a_cancelled_request_leaves_the_engine(served: Served) -> None:
    async def story() -> None:
        running = asyncio.ensure_future(served.rollout.generate(Request((5, 6), 200)))
        while not served.rollout.running:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not served.rollout.running
        await served.rollout.pause(InFlight.DRAIN)
        # It gives up after ten seconds while SGLang has a request.
        await served.rollout.sleep(frozenset({Memory.KV_CACHE}))
        await served.rollout.wake(frozenset({Memory.KV_CACHE}))
        await served.rollout.resume()

    served.run(story)


def test_a_request_that_is_cancelled_while_it_is_frozen_holds_no_update_up(
    served: Served, reference: TransformersReference
) -> None:
    async def story() -> None:
        rollout, request = served.rollout, Request((5, 6), 200)
        running = asyncio.ensure_future(rollout.generate(request))
        while not rollout.running:
            await asyncio.sleep(0.001)
        await rollout.pause(InFlight.STALE_KV)
        running.cancel()
        await asyncio.wait({running})
        await served.edge.push((n, torch.from_numpy(t)) for n, t in reference.tensors.items())
        await rollout.resume()
        done = await rollout.generate(request)
        assert set(done.versions) == {served.edge.version}

    served.run(story)


def test_the_cache_has_as_many_tokens_as_its_bytes_hold(served: Served) -> None:
    """The pool that SGLang made, against the formula of the arguments."""
    rollout = served.rollout
    each = bytes_per_token(text_config(Path(rollout.model.path)), "float32", rollout.config)
    (worker,) = rollout.workers
    assert abs(worker.cache_tokens - CPU_CACHE_GIB * GIB / each) < 256
