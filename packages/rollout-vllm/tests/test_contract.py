"""What inference engines do differently from each other, and a rollout may not: one
behaviour for each case.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Completion, InFlight, Memory, Request
from coupler.testing.edge import Served
from coupler.testing.reference import TransformersReference
from coupler_rollout_vllm.compat import engine

POSITIONS = 256  # of the model


def generate(served: Served, *requests: Request) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*map(served.rollout.generate, requests))

    return served.run(together)


def push(served: Served, reference: TransformersReference, **changed: np.ndarray) -> Any:
    tensors = {**reference.tensors, **changed}
    return served.push((name, torch.from_numpy(tensor)) for name, tensor in tensors.items())


def error(reference: TransformersReference, request: Request, done: Completion) -> float:
    want = reference.logprobs_of(request.prompt, done.tokens, request.temperature)
    return float(np.abs(want - done.logprobs).max())


def test_ids_that_are_as_likely_as_the_last_one_are_in_the_mask(
    served: Served, reference: TransformersReference
) -> None:
    """vLLM keeps them all, which it may not without saying so."""
    name = "model.embed_tokens.weight"
    try:
        push(served, reference, **{name: np.repeat(reference.tensors[name][::2], 2, axis=0)})
        for done in generate(served, *(Request((5, 6), 6, seed=i, top_k=3) for i in range(4))):
            assert done.sampling_mask.shape == (6, 4)
            for token, row in zip(done.tokens, done.sampling_mask, strict=True):
                pairs = sorted(row.tolist())
                assert token in pairs and [i + 1 for i in pairs[::2]] == pairs[1::2]

        push(served, reference, **{name: np.zeros_like(reference.tensors[name])})
        with pytest.raises(CouplerError, match=r"among 22 ids or more with sampling\.top_k=3"):
            generate(served, Request((5, 6), 6, top_k=3))
    finally:
        push(served, reference)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((7,) * POSITIONS, 1), "a prompt has 256 tokens; this rollout takes 1 to 255"),
        (Request((), 1), "a prompt has 0 tokens"),
        (Request((7,), 0), "wants 0 tokens"),
        (Request((7, 320), 1), "the model knows 0 to 319"),
        (
            Request((7,), 1, temperature=-1.0),
            "sampling.temperature must be 0, or between 0.01 and 2",
        ),
        (
            Request((7,), 1, temperature=0.001),
            "sampling.temperature must be 0",
        ),  # vLLM would take 0.01 for it
        (Request((7,), 1, temperature=2.5), "sampling.temperature must be 0"),
    ],
)
def test_malformed_requests_are_refused_before_the_engine(
    served: Served, request_: Request, message: str
) -> None:
    with pytest.raises(CouplerError, match=message):
        generate(served, request_)


def test_logprobs_that_do_not_match_the_tokens_are_an_error() -> None:
    """Not an empty completion, and not an index error three calls later."""
    output = SimpleNamespace(
        new_token_ids=[1, 2], new_logprobs=SimpleNamespace(logprobs=np.array([[-0.5]]))
    )
    with pytest.raises(CouplerError, match="1 log-probs of 2 tokens"):
        engine.logprobs_of(output)


def test_an_answer_that_cannot_be_read_is_an_error_of_its_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no death of the engine, and later requests have answers again."""
    lost = 0

    async def shortened(of: Any, receive: Any = engine.next_outputs) -> list[Any]:
        outputs = await receive(of)
        for output in outputs:
            del output.new_token_ids[:lost]
        return outputs

    async def story() -> None:
        nonlocal lost
        monkeypatch.setattr(engine, "next_outputs", shortened)
        request = Request((5, 6), 8, seed=1)
        # The client has called the original before.
        whole = await served.rollout.generate(request)
        lost = 1
        with pytest.raises(CouplerError, match="8 log-probs of 7 tokens"):
            await asyncio.wait_for(served.rollout.generate(request), 60)
        lost = 0
        assert await asyncio.wait_for(served.rollout.generate(request), 60) == whole

    served.run(story)


def test_hand_overs_leave_memory_flat(served: Served, reference: TransformersReference) -> None:
    """30 of them, of this process and the engine's; test_gpu.py counts the device's
    too.
    """
    pids = [os.getpid(), *(worker["pid"] for worker in served.rollout.workers)]

    def held() -> int:
        fields = [Path(f"/proc/{pid}/statm").read_text().split() for pid in pids]
        return sum(int(resident) - int(shared) for _, resident, shared, *_ in fields) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    async def cycles(count: int) -> None:
        rollout = served.rollout
        for _ in range(count):
            await rollout.pause(InFlight.DRAIN)
            await rollout.sleep(frozenset({Memory.KV_CACHE}))
            await rollout.sleep(frozenset({Memory.WEIGHTS}))
            await rollout.wake(frozenset({Memory.WEIGHTS}))
            await served.edge.push(
                (name, torch.from_numpy(tensor)) for name, tensor in reference.tensors.items()
            )
            await rollout.wake(frozenset({Memory.KV_CACHE}))
            await rollout.resume()
            await rollout.generate(Request((5, 6, 7), 8, seed=1))

    served.run(lambda: cycles(10))
    before = held()
    served.run(lambda: cycles(30))
    assert held() - before < 24 << 20


def test_more_prompts_than_fit_into_one_step(
    served: Served, reference: TransformersReference
) -> None:
    """The last one of a step is cut into pieces, or waits: either way every request
    gets what its seed says.
    """
    # 12,060 tokens
    requests = [Request((5 + i, *range(4, 204)), 2, seed=i) for i in range(60)]
    done = generate(served, *requests)
    assert max(error(reference, r, d) for r, d in zip(requests, done, strict=True)) < 1e-3
    assert generate(served, requests[41]) == [done[41]]


def test_answers_of_a_crowd_arrive_together(
    served: Served, reference: TransformersReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends at a step of its own; to wait for a message costs more than to read an
    answer.
    """
    messages: list[int] = []

    async def counted(of: Any, receive: Any = engine.next_outputs) -> list[Any]:
        outputs = await receive(of)
        messages.append(len(outputs))
        return outputs

    monkeypatch.setattr(engine, "next_outputs", counted)
    requests = [Request((5, 6 + i), i + 1, seed=i) for i in range(128)]
    done = generate(served, *requests)
    assert [len(d.tokens) for d in done] == [r.max_tokens for r in requests]
    assert max(error(reference, r, d) for r, d in zip(requests, done, strict=True)) < 1e-3
    assert sum(messages) > 120  # the first may have been waited for before
    assert (
        len(messages) < 60
    )  # each of the first 19, then two', and of the last ones seven steps' at a time


def test_an_answer_that_waits_for_others_comes_when_these_are_cancelled(served: Served) -> None:
    """It may wait for ten steps, at some time between those tried; nothing is left then
    for the engine to run.
    """

    async def story() -> None:
        generate, request = served.rollout.generate, Request((5, 6), 200, seed=1)
        start = time.perf_counter()
        await generate(request)
        took = time.perf_counter() - start
        for delay in np.linspace(0.9, 1.4, 16):
            done = asyncio.create_task(generate(request))
            other = asyncio.create_task(generate(Request((5, 7), 240, seed=2)))
            await asyncio.sleep(took * delay)
            other.cancel()
            assert len((await asyncio.wait_for(done, 30)).tokens) == 200

    served.run(story)


def test_nothing_happens_under_running_requests(
    served: Served, reference: TransformersReference
) -> None:
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
    """A prompt of many blocks is sampled, weights change, and the same prompt is
    sampled again.
    """
    request = Request(tuple(range(10, 74)), 6, seed=4)
    generate(served, request)
    changed = {
        name: 1.5 * tensor
        for name, tensor in reference.tensors.items()
        if "k_proj" in name or "v_proj" in name
    }
    push(served, reference, **changed)
    assert error(reference, request, generate(served, request)[0]) > 1e-2
    push(served, reference)
    assert error(reference, request, generate(served, request)[0]) < 1e-3


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
