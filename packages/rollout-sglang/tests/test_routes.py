"""Which experts tokens went to: from SGLang's process, against the reference."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prefixes import cached_tokens

from coupler.engine_kit.inference.gated import Sampled
from coupler.errors import ConfigError, CouplerError
from coupler.interfaces import Completion, InFlight, Model, Request
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.models import write_qwen3_moe
from coupler.testing.reference import TransformersReference, as_batch
from coupler_rollout_sglang import hooks
from coupler_rollout_sglang.arguments import server_arguments
from coupler_rollout_sglang.completions import Routers, sampling_of
from coupler_rollout_sglang.config import Mode, Precision, SGLangConfig
from coupler_rollout_sglang.messages import ROUTES_KEY, VERSION_KEY
from coupler_rollout_sglang.rollout import SGLangRollout

SEQUENCES, LAYERS = 4, 3
PROMPT = tuple(range(10, 50))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def experts(folder: Path) -> TransformersReference:
    return TransformersReference(written(folder / "first", seed=0))


@pytest.fixture(scope="module")
def others(folder: Path) -> TransformersReference:
    """The same model with other weights everywhere."""
    return TransformersReference(written(folder / "second", seed=1))


def written(folder: Path, seed: int) -> Path:
    return write_qwen3_moe(folder, seed, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def mixture(kernels: None, experts: TransformersReference) -> Iterator[Served]:
    one = serve(experts)
    yield one
    one.close()


def serve(reference: TransformersReference, mode: Mode = Mode.ENGINE) -> Served:
    config = SGLangConfig(
        mode=mode, dtype=Precision.FP32, max_sequences=SEQUENCES, routed_experts=True
    )
    return Served(
        SGLangRollout(config, Model(str(reference.folder))), Plugins.load().get("transport", "tcp")
    )


def weights(reference: TransformersReference) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, torch.from_numpy(tensor)) for name, tensor in reference.tensors.items())


def generate(served: Served, *requests: Request) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*map(served.rollout.generate, requests))

    return served.run(together)


def asked(prompt: tuple[int, ...], tokens: int, seed: int = 0) -> Request:
    return Request(prompt, tokens, seed=seed, routed_experts=True)


def routes(reference: TransformersReference, request: Request, done: Completion) -> np.ndarray:
    """Return the experts that the reference chooses, in order."""
    return np.sort(reference.routes(as_batch(request.prompt, done.tokens, 1.0)), 2)


def same(reference: TransformersReference, request: Request, done: Completion) -> None:
    """Check the routes of all tokens but the last, which was never fed."""
    found = np.sort(done.routed_experts, 2)
    np.testing.assert_array_equal(found[:-1], routes(reference, request, done)[:-1])
    assert (found[-1] == -1).all()


def test_all_routes_are_those_of_the_reference(
    mixture: Served, experts: TransformersReference
) -> None:
    """More requests than are decoded together, and one that asks for nothing."""
    mixture.push(weights(experts))
    requests = [asked((5, 6, 7 + i), 9 + i, seed=i) for i in range(2 * SEQUENCES)]
    *done, plain = generate(mixture, *requests, Request((5, 6, 7), 9))
    for request, each in zip(requests, done, strict=True):
        same(experts, request, each)
        assert len(each.tokens) == request.max_tokens
    assert plain.routed_experts is None


def test_a_prefix_in_the_cache_has_its_routes(
    mixture: Served, experts: TransformersReference
) -> None:
    """Also of a request that asked for none when it filled the cache."""
    mixture.push(weights(experts))
    generate(mixture, Request(PROMPT, 4))
    request = asked((*PROMPT, 60), 8)
    with cached_tokens(mixture.rollout) as cached:
        (done,) = generate(mixture, request)
    assert cached == [len(PROMPT)]
    same(experts, request, done)


def paused(
    served: Served,
    how: InFlight,
    requests: list[Request],
    old: TransformersReference,
    new: TransformersReference,
) -> list[Completion]:
    """Pause amid these requests, of which :data:`SEQUENCES` have tokens, and bring new
    weights.
    """

    async def story(delay: float) -> list[Completion]:
        running = [asyncio.ensure_future(served.rollout.generate(r)) for r in requests]
        await asyncio.sleep(delay)
        await served.rollout.pause(how)
        await served.edge.push(weights(new))
        await served.rollout.resume()
        return await asyncio.gather(*running)

    for delay in (0.4, 1.0, 3.0):
        served.push(weights(old))
        before = served.edge.version
        done = served.run(partial(story, delay))
        if sum(before in each.versions for each in done) >= SEQUENCES:
            return done
    raise AssertionError(f"fewer than {SEQUENCES} requests began within {delay:g} s")


@pytest.mark.parametrize("how", [InFlight.RECOMPUTE, InFlight.STALE_KV])
def test_tokens_keep_the_routes_that_sampled_them(
    mixture: Served,
    experts: TransformersReference,
    others: TransformersReference,
    how: InFlight,
) -> None:
    requests = [asked((5, 6, 7 + i), 200, seed=i) for i in range(SEQUENCES)]
    every = paused(mixture, how, requests, experts, others)
    for request, done in zip(requests, every, strict=True):
        old = len(request.prompt) + done.versions.count(done.versions[0]) - 1
        before, after = routes(experts, request, done), routes(others, request, done)
        assert len(set(done.versions)) == 2, "the pause came too late"

        found = np.sort(done.routed_experts, 2)
        np.testing.assert_array_equal(found[:old], before[:old])
        assert (found[old:-1] >= 0).all() and (found[-1] == -1).all()
        if how is InFlight.RECOMPUTE:
            np.testing.assert_array_equal(found[old:-1], after[old:-1])


def test_what_an_abort_returns_has_its_routes(
    mixture: Served, experts: TransformersReference
) -> None:
    """Requests that waited were never fed, and have a row of -1 for every token."""
    requests = [asked((5, 6, 7 + i), 200, seed=i) for i in range(2 * SEQUENCES)]
    every = paused(mixture, InFlight.ABORT, requests, experts, experts)
    fed = []
    for request, done in zip(requests, every, strict=True):
        assert done.finish == "abort"
        assert done.routed_experts.shape == (len(request.prompt) + len(done.tokens), LAYERS, 2)
        fed.append(bool(done.tokens))
        if done.tokens:
            same(experts, request, done)
        else:
            assert (done.routed_experts == -1).all()
    assert sorted(fed) == [False] * SEQUENCES + [True] * SEQUENCES


@pytest.mark.slow
def test_a_server_returns_them_too(experts: TransformersReference) -> None:
    served = serve(experts, Mode.SERVER)
    try:
        served.push(weights(experts))
        request = asked((5, 6, 7), 12, seed=3)
        same(experts, request, generate(served, request)[0])
    finally:
        served.close()


# --- what SGLang may answer

ROUTERS = Routers(layers=3, topk=2, written=(1, 2))
"""A model whose first layer has no router."""


def answer(written: np.ndarray | None, tokens: int = 2, finish: str = "length") -> dict[str, Any]:
    meta: dict[str, Any] = {
        "output_token_logprobs": [(-0.5, 1, None)] * tokens,
        VERSION_KEY: [3] * tokens,
        "finish_reason": {"type": finish},
    }
    if written is not None:
        meta[ROUTES_KEY] = base64.b64encode(written.astype(np.int32).tobytes()).decode()
    return {"output_ids": [1] * tokens, "meta_info": meta}


def test_layers_without_a_router_are_left_out() -> None:
    written = np.arange(4 * 3 * 2).reshape(4, 3, 2)
    found, _ = sampling_of(answer(written), prompt=3, routers=ROUTERS)
    np.testing.assert_array_equal(found.each_route(), written[:, 1:])


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (None, r"(?s)returned no experts of the tokens.*it takes routed_experts=true"),
        (np.ones((3, 3, 2)), "returned 18 numbers of experts for 4 tokens of 3 layers with 2"),
        (
            np.ones((4, 3, 2)) * [[[0, 0], [0, 1], [0, 0]]],
            r"(?s)no experts of layer 2, .*try:  rollout\.extra_args\.moe_runner_backend=triton",
        ),
    ],
    ids=["none", "of-three-tokens", "of-one-layer"],
)
def test_routes_that_are_not_there_are_an_error(written: np.ndarray | None, sentence: str) -> None:
    with pytest.raises(CouplerError, match=sentence):
        sampling_of(answer(written), prompt=3, routers=ROUTERS)


def test_a_stay_that_was_cut_off_at_once_leaves_earlier_routes() -> None:
    written = np.ones((4, 3, 2)) * [[[0, 0], [0, 1], [1, 0]]]
    first, _ = sampling_of(answer(written), prompt=3, routers=ROUTERS)
    none, finish = sampling_of(answer(None, 0, "abort"), prompt=5, routers=ROUTERS)
    assert (none.tokens, finish) == ([], "abort")

    done = Sampled()
    for stay in (none, first, none):
        done.add(stay)
    found = done.completion(asked((4, 5, 6), 9), "abort").routed_experts
    np.testing.assert_array_equal(found[:4], written[:, 1:])
    assert (len(found), found[4:].min(), found[4:].max()) == (5, -1, -1)


@pytest.mark.parametrize("shared", [True, False])
def test_routes_do_not_lie_where_the_next_batch_writes(shared: bool) -> None:
    """SGLang 0.5.17 hands out its buffer, and later releases a copy."""
    buffer = torch.arange(12).reshape(3, 2, 2)
    topk = buffer[:2] if shared else buffer[:2].clone()
    result = SimpleNamespace(topk=topk)
    capturer = SimpleNamespace(device_cache=SimpleNamespace(buffer=buffer))

    kept = hooks.kept_apart(result, capturer, forward_batch=None)
    assert (kept.topk is topk) is not shared
    buffer.zero_()
    assert kept.topk.flatten().tolist() == list(range(8))
    assert hooks.kept_apart(None, capturer) is None


def test_a_model_without_experts_is_refused(reference: TransformersReference) -> None:
    config = SGLangConfig(routed_experts=True)
    sentence = r"(?s)rollout\.routed_experts=true needs a mixture.*num_experts_per_tok.*=false"
    with pytest.raises(ConfigError, match=sentence):
        server_arguments(config, str(reference.folder), 0, False, gpu=True)
