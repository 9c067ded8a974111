"""An adapter that vLLM runs itself: what arrives, what is accounted for, and what has
to come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from coupler.batch import Batch
from coupler.engine_kit.lora_names import names_of
from coupler.errors import WeightSyncError
from coupler.interfaces import (
    Completion,
    Engine,
    InFlight,
    Memory,
    Model,
    Named,
    Output,
    Rank,
    Request,
    WeightUpdate,
)
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served, amid_tokens
from coupler.testing.reference import TransformersReference, as_batch
from coupler.testing.subject import configured

RANK = 4
CLOSE, FAR = 1e-3, 1e-2  # nats: of one policy, of two
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
# one of several blocks of the prefix cache
PROMPTS = ((7, 8, 9), tuple(range(10, 74)), (5,))


@pytest.fixture(scope="module")
def adapted(start: Callable[..., Served]) -> Served:
    return start(max_lora_rank=RANK)


@pytest.fixture
def engine(reference: TransformersReference) -> Engine:
    """An engine whose adapter is far from 0, as after much training."""
    backend = Plugins.load().get("engine", "fsdp")
    config = configured(
        backend.config, {"dtype": "fp32", "lora_rank": RANK, "lora_alpha": 8.0, "lr": 1e-2}
    )
    made = backend.load()(config, Model(str(reference.folder)))
    made.setup(Rank(seed=1))
    return made


def move(engine: Any, seed: int) -> None:
    """Another adapter, as training makes it."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in engine.adapter.parameters().values():
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=random))


def sample(served: Served) -> list[Batch]:
    requests = [
        Request(prompt, 8, t, seed=len(prompt))
        for prompt, t in zip(PROMPTS, (1.0, 0.7, 1.3), strict=True)
    ]

    async def together() -> Any:
        return await asyncio.gather(*map(served.rollout.generate, requests))

    batches = []
    for request, done in zip(requests, served.run(together), strict=True):
        assert set(done.versions) == {served.edge.version}
        batch = as_batch(request.prompt, done.tokens, request.temperature)
        theirs = [0.0] * len(request.prompt) + list(done.logprobs)
        batches.append(batch.with_tokens(theirs=np.array(theirs, np.float32)))
    return batches


def difference(engine: Engine, samples: list[Batch]) -> float:
    """Largest |log-prob difference| of engine and rollout."""
    batch = Batch.concat(samples)
    ours = engine.forward(batch, (Output("logprobs"),))["logprobs"]
    return float(np.abs(ours - batch["theirs"])[batch["loss_mask"]].max())


def push(served: Served, weights: Iterator[Named] | list[Named], **how: bool) -> Any:
    sent, receipt = served.push(weights, **how)
    assert (receipt.num_received, receipt.num_bytes) == (sent.num_tensors, sent.num_bytes)
    return receipt


def test_logprobs_are_the_merged_policys_after_every_update(
    adapted: Served, engine: Engine
) -> None:
    """Three adapters upon weights that came once; and the sum of both, which other
    rollouts get, gives the same.
    """
    push(adapted, engine.base_weights())
    assert difference(engine, sample(adapted)) < CLOSE, "B is 0: the weights alone are the policy"
    for seed in range(3):
        before = sample(adapted)
        move(engine, seed)
        receipt = push(adapted, engine.adapter_weights(), adapter=True)
        # A and B of seven linear maps in each of two layers
        assert receipt.num_loaded == 2 * 7 * 2
        assert (receipt.missing, receipt.unexpected) == ((), ())
        samples = sample(adapted)
        assert difference(engine, samples) < CLOSE
        assert difference(engine, before) > FAR
    push(adapted, engine.weights())
    assert difference(engine, sample(adapted)) < CLOSE


def test_weights_alone_put_an_adapter_away(adapted: Served, engine: Engine) -> None:
    push(adapted, engine.base_weights())
    start = sample(adapted)
    move(engine, 0)
    push(adapted, engine.adapter_weights(), adapter=True)
    push(adapted, engine.base_weights())
    again = sample(adapted)
    assert [b["theirs"].tolist() for b in again] == [b["theirs"].tolist() for b in start]
    assert difference(engine, again) > FAR


@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_without_its_other_half_is_named(
    adapted: Served, engine: Engine, which: int
) -> None:
    push(adapted, engine.base_weights())
    dropped, alone = names_of(Q_PROJ)[which], names_of(Q_PROJ)[1 - which]
    receipt = push(
        adapted, [(n, t.clone()) for n, t in engine.adapter_weights() if n != dropped], adapter=True
    )
    assert (receipt.missing, receipt.unexpected) == ((dropped,), (alone,))
    assert receipt.num_loaded == receipt.num_received - 1 == 26


def test_what_an_earlier_adapter_had_is_missed(adapted: Served, engine: Engine) -> None:
    push(adapted, engine.base_weights())
    push(adapted, engine.adapter_weights(), adapter=True)
    some = [(n, t.clone()) for n, t in engine.adapter_weights() if n not in names_of(Q_PROJ)]
    assert push(adapted, some, adapter=True).missing == names_of(Q_PROJ)
    push(adapted, engine.base_weights())
    assert push(adapted, some, adapter=True).missing == ()


@pytest.mark.parametrize(
    "weight",
    [
        "model.embed_tokens.weight",  # a layer, but none that an adapter is for
        "model.layers.1.self_attn.nobody_proj.weight",
        "model.layers.9.self_attn.q_proj.weight",
    ],
)
def test_a_target_that_vllm_does_not_adapt_is_named(
    adapted: Served, engine: Engine, weight: str
) -> None:
    push(adapted, engine.base_weights())
    extra = [
        (name, torch.ones(shape))
        for name, shape in zip(names_of(weight), ((RANK, 128), (128, RANK)), strict=True)
    ]
    receipt = push(
        adapted, [*((n, t.clone()) for n, t in engine.adapter_weights()), *extra], adapter=True
    )
    assert receipt.unexpected == names_of(weight)
    assert receipt.num_loaded == 28


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("more", [-8, 8])
def test_a_tensor_of_another_width_is_an_error(
    adapted: Served, engine: Engine, which: int, more: int
) -> None:
    """vLLM copies a narrower one into a part of its place, and says nothing."""
    push(adapted, engine.base_weights())
    name = names_of(Q_PROJ)[which]
    width = 128 + more
    other = torch.ones((RANK, width) if which == 0 else (width, RANK))
    some = [(n, other if n == name else t.clone()) for n, t in engine.adapter_weights()]
    with pytest.raises(
        WeightSyncError, match=name if more < 0 else "does not fit the rollout's model"
    ):
        push(adapted, some, adapter=True)


def test_a_rank_above_the_rollouts_is_refused(adapted: Served, engine: Engine) -> None:
    push(adapted, engine.base_weights())
    larger = zip(names_of(Q_PROJ), (torch.ones(9, 128), torch.ones(128, 9)), strict=True)
    with pytest.raises(
        WeightSyncError, match=r"(?s)rank 9 came; .* of 8 at most.*set:  rollout.max_lora_rank"
    ):
        push(adapted, larger, adapter=True)


def test_weights_that_slept_come_again_before_an_adapter(adapted: Served, engine: Engine) -> None:
    async def nap() -> None:
        rollout = adapted.rollout
        await rollout.pause(InFlight.DRAIN)
        await rollout.sleep(frozenset({Memory.KV_CACHE}))
        assert await rollout.holds_base()
        await rollout.sleep(frozenset({Memory.WEIGHTS}))
        await rollout.wake(frozenset(Memory))
        assert not await rollout.holds_base()
        with pytest.raises(
            WeightSyncError, match="an adapter came, and the weights beneath it did not"
        ):
            await rollout.update(WeightUpdate(0, "lora", "", (), 1, 60.0, adapter=True))
        await rollout.resume()

    push(adapted, engine.base_weights())
    move(engine, 5)
    push(adapted, engine.adapter_weights(), adapter=True)
    adapted.run(nap)
    push(adapted, engine.base_weights())
    push(adapted, engine.adapter_weights(), adapter=True)
    assert difference(engine, sample(adapted)) < CLOSE


def test_requests_in_flight_go_on_with_the_new_adapter(adapted: Served, engine: Engine) -> None:
    """Frozen with their cache, or cut off and entered again: each token has the version
    that sampled it.
    """
    push(adapted, engine.base_weights())
    push(adapted, engine.adapter_weights(), adapter=True)

    async def story(how: InFlight, seed: int, delay: float) -> Completion:
        rollout, before = adapted.rollout, adapted.edge.version
        request = Request((5, 6, 7), 240, seed=seed)
        running = asyncio.ensure_future(rollout.generate(request))
        while not rollout.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(delay)
        await rollout.pause(how)
        move(engine, seed)
        await adapted.edge.push(engine.adapter_weights(), adapter=True)
        await rollout.resume()
        done = await running
        assert len(done.tokens) == 240 and done.versions == tuple(sorted(done.versions))
        assert set(done.versions) <= {before, adapted.edge.version}
        if how is InFlight.RECOMPUTE:
            batch = as_batch(request.prompt, done.tokens, 1.0)
            ours = engine.forward(batch, (Output("logprobs"),))["logprobs"][3:]
            later = np.array(done.versions) == adapted.edge.version
            assert (np.abs(ours - np.array(done.logprobs))[later] < CLOSE).all()
        return done

    for seed, how in enumerate((InFlight.STALE_KV, InFlight.RECOMPUTE)):
        amid_tokens(
            lambda delay, how=how, seed=seed: adapted.run(lambda: story(how, seed + 10, delay)),
            lambda done: len(set(done.versions)) == 2,
        )
    assert difference(engine, sample(adapted)) < CLOSE


@pytest.mark.slow
def test_workers_that_split_the_model_split_the_adapter(
    start: Callable[..., Served], engine: Engine
) -> None:
    """Each cuts A of some layers and B of others; a tensor that one of them has its
    part of alone does not count.
    """
    split = start(max_lora_rank=RANK, tensor_parallel=2)
    push(split, engine.base_weights())
    for seed in range(2):
        move(engine, seed)
        receipt = push(split, engine.adapter_weights(), adapter=True)
        assert (receipt.num_loaded, receipt.missing, receipt.unexpected) == (28, (), ())
        assert difference(engine, sample(split)) < CLOSE
    name = names_of("model.layers.0.self_attn.o_proj.weight")[
        0
    ]  # each worker has its half of the columns
    some = [(n, t[:, :-8] if n == name else t.clone()) for n, t in engine.adapter_weights()]
    with pytest.raises(WeightSyncError, match=f"{name} does not fit"):
        push(split, some, adapter=True)


def test_names_and_shapes_are_those_of_peft(engine: Engine) -> None:
    sent = {name: tuple(tensor.shape) for name, tensor in engine.adapter_weights()}
    stem = "base_model.model.model.layers.0.mlp.down_proj"
    assert (sent[f"{stem}.lora_A.weight"], sent[f"{stem}.lora_B.weight"]) == (
        (RANK, 96),
        (128, RANK),
    )
    assert len(sent) == len(engine.adapter.parameters())  # type: ignore[attr-defined]
