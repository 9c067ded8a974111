"""An adapter that SGLang runs itself: what arrives, what is accounted for, and what has
to come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from coupler.batch import Batch
from coupler.engine_kit.inference.loading import Piece, Plan, Way
from coupler.engine_kit.lora_names import A, names_of
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
from coupler_rollout_sglang.worker.adapters import places
from coupler_rollout_sglang.worker.receiver import plan_beneath

RANK, ROOM = 4, 8
CLOSE, FAR = 1e-3, 1e-2  # Nats: of one policy, and of two.
TENSORS = 2 * 7 * 2  # A and B of seven linear maps in each of two layers.
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
# The second one fills pages of the prefix cache.
PROMPTS = ((7, 8, 9), tuple(range(10, 74)), (5,))


@pytest.fixture(scope="module")
def adapted(start: Callable[..., Served]) -> Served:
    return start(max_lora_rank=ROOM)


@pytest.fixture
def engine(reference: TransformersReference) -> Engine:
    backend = Plugins.load().get("engine", "fsdp")
    config = configured(backend.config, {"dtype": "fp32", "lora_rank": RANK, "lora_alpha": 8.0})
    made = backend.load()(config, Model(str(reference.folder)))
    made.setup(Rank(seed=1))
    return made


@pytest.fixture
def based(adapted: Served, engine: Engine) -> Served:
    """The replica with weights, and no adapter upon them."""
    push(adapted, engine.base_weights())
    return adapted


def move(engine: Any, seed: int) -> None:
    """Make another adapter, far from 0 as after much training."""
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
    """Return the largest log-prob difference of engine and rollout."""
    batch = Batch.concat(samples)
    ours = engine.forward(batch, (Output("logprobs"),))["logprobs"]
    return float(np.abs(ours - batch["theirs"])[batch["loss_mask"]].max())


def push(served: Served, weights: Iterable[Named], **how: bool) -> Any:
    sent, receipt = served.push(weights, **how)
    assert (receipt.num_received, receipt.num_bytes) == (sent.num_tensors, sent.num_bytes)
    return receipt


def tensors(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.adapter_weights()}


def test_logprobs_are_the_merged_policys_after_every_update(based: Served, engine: Engine) -> None:
    """Three adapters upon weights that came once. Their sum, which other rollouts get,
    gives the same.
    """
    assert difference(engine, sample(based)) < CLOSE, "B is 0: the weights alone are the policy"
    for seed in range(3):
        before = sample(based)
        move(engine, seed)
        receipt = push(based, engine.adapter_weights(), adapter=True)
        assert (receipt.num_loaded, receipt.missing, receipt.unexpected) == (TENSORS, (), ())
        assert difference(engine, sample(based)) < CLOSE
        assert difference(engine, before) > FAR
    push(based, engine.weights())
    assert difference(engine, sample(based)) < CLOSE


def test_weights_alone_put_an_adapter_away(based: Served, engine: Engine) -> None:
    start = sample(based)
    move(engine, 0)
    push(based, engine.adapter_weights(), adapter=True)
    push(based, engine.base_weights())
    again = sample(based)
    for one, other in zip(again, start, strict=True):
        assert np.abs(one["theirs"] - other["theirs"]).max() < CLOSE
    assert difference(engine, again) > FAR


def test_an_adapter_of_lower_rank_leaves_nothing_of_the_one_before(
    based: Served, engine: Engine
) -> None:
    move(engine, 1)
    wide = {
        name: torch.cat([tensor, tensor], dim=0 if name.endswith(A) else 1)
        for name, tensor in tensors(engine).items()
    }
    push(based, wide.items(), adapter=True)
    assert difference(engine, sample(based)) > FAR
    push(based, engine.adapter_weights(), adapter=True)
    assert difference(engine, sample(based)) < CLOSE


@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_without_its_other_half_is_named(
    based: Served, engine: Engine, which: int
) -> None:
    dropped, alone = names_of(Q_PROJ)[which], names_of(Q_PROJ)[1 - which]
    some = {name: tensor for name, tensor in tensors(engine).items() if name != dropped}
    receipt = push(based, some.items(), adapter=True)
    assert (receipt.missing, receipt.unexpected) == ((dropped,), (alone,))
    assert receipt.num_loaded == receipt.num_received - 1 == TENSORS - 2


def test_what_an_earlier_adapter_had_is_missed(based: Served, engine: Engine) -> None:
    push(based, engine.adapter_weights(), adapter=True)
    some = {n: t for n, t in tensors(engine).items() if n not in names_of(Q_PROJ)}
    assert push(based, some.items(), adapter=True).missing == names_of(Q_PROJ)
    push(based, engine.base_weights())
    assert push(based, some.items(), adapter=True).missing == ()


@pytest.mark.parametrize(
    "weight",
    [
        # It is a layer, but none that an adapter is for.
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.nobody_proj.weight",
        "model.layers.9.self_attn.q_proj.weight",
    ],
)
def test_a_target_that_sglang_does_not_adapt_is_named(
    based: Served, engine: Engine, weight: str
) -> None:
    extra = zip(names_of(weight), (torch.ones(RANK, 128), torch.ones(128, RANK)), strict=True)
    receipt = push(based, [*tensors(engine).items(), *extra], adapter=True)
    assert receipt.unexpected == names_of(weight)
    assert receipt.num_loaded == TENSORS


@pytest.mark.parametrize(
    ("which", "shape", "sentence"),
    [
        (0, (RANK, 120), r"(?s)q_proj\.lora_A.* does not fit the rollout's model.*\[4, 120\]"),
        (0, (RANK, 136), r"(?s)q_proj\.lora_A.* does not fit the rollout's model.*\[4, 136\]"),
        (1, (136, RANK), r"(?s)q_proj\.lora_B.* does not fit the rollout's model.*\[136, 4\]"),
        (1, (128, RANK - 1), r"(?s)q_proj\.lora_B.* does not fit the rollout's model.*\[128, 3\]"),
        (
            0,
            (ROOM + 1, 128),
            r"(?s)rank 9 came; the rollout has room for 8.*set:  rollout\.max_lora_rank=9",
        ),
    ],
)
def test_a_refused_adapter_leaves_the_one_before(
    based: Served, engine: Engine, which: int, shape: tuple[int, int], sentence: str
) -> None:
    """Nothing is copied before all tensors fit. What is sampled meanwhile is refused,
    until an update succeeds.
    """
    move(engine, 7)
    push(based, engine.adapter_weights(), adapter=True)
    version = based.rollout.version

    other = {name: tensor + 1 for name, tensor in tensors(engine).items()}
    other[names_of(Q_PROJ)[which]] = torch.ones(shape)
    with pytest.raises(WeightSyncError, match=sentence):
        push(based, other.items(), adapter=True)
    assert based.rollout.version == version
    assert based.run(based.rollout.holds_base)

    # An empty adapter changes nothing: its receipt misses all that is there.
    missed = push(based, (), adapter=True).missing
    assert missed == tuple(sorted(other))
    assert difference(engine, sample(based)) < CLOSE


def test_weights_that_slept_come_again_before_an_adapter(based: Served, engine: Engine) -> None:
    async def nap() -> None:
        rollout = based.rollout
        await rollout.pause(InFlight.DRAIN)
        await rollout.sleep(frozenset({Memory.KV_CACHE}))
        assert await rollout.holds_base()
        await rollout.sleep(frozenset({Memory.WEIGHTS}))
        await rollout.wake(frozenset(Memory))
        assert not await rollout.holds_base()
        with pytest.raises(WeightSyncError, match="an adapter came, and the weights beneath"):
            await rollout.update(WeightUpdate(0, "lora", "", (), 1, 60.0, adapter=True))
        await rollout.resume()

    move(engine, 5)
    push(based, engine.adapter_weights(), adapter=True)
    based.run(nap)
    push(based, engine.base_weights())
    push(based, engine.adapter_weights(), adapter=True)
    assert difference(engine, sample(based)) < CLOSE


def test_requests_in_flight_go_on_with_the_new_adapter(based: Served, engine: Engine) -> None:
    """Frozen with their cache, or cut off and entered again: each token has the version
    that sampled it.
    """
    push(based, engine.adapter_weights(), adapter=True)

    async def story(how: InFlight, seed: int, delay: float) -> Completion:
        rollout, before = based.rollout, based.edge.version
        request = Request((5, 6, 7), 200, seed=seed)
        running = asyncio.ensure_future(rollout.generate(request))
        while not rollout.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(delay)

        await rollout.pause(how)
        move(engine, seed)
        await based.edge.push(engine.adapter_weights(), adapter=True)
        await rollout.resume()
        done = await running
        assert len(done.tokens) == 200 and done.versions == tuple(sorted(done.versions))
        assert set(done.versions) <= {before, based.edge.version}

        if how is InFlight.RECOMPUTE:
            batch = as_batch(request.prompt, done.tokens, 1.0)
            ours = engine.forward(batch, (Output("logprobs"),))["logprobs"][3:]
            later = np.array(done.versions) == based.edge.version
            assert (np.abs(ours - np.array(done.logprobs))[later] < CLOSE).all()
        return done

    for seed, how in enumerate((InFlight.STALE_KV, InFlight.RECOMPUTE)):
        amid_tokens(
            lambda delay, how=how, seed=seed: based.run(lambda: story(how, seed + 10, delay)),
            lambda done: len(set(done.versions)) == 2,
        )
    assert difference(engine, sample(based)) < CLOSE


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_takes_the_part_of_an_adapter_that_it_has_of_the_weight(worker: int) -> None:
    """Of q, k and v, fused and cut by rows, and of o, cut by columns. SGLang splits no
    model on the CPU.
    """
    width, room, rank = 8, 3, 2
    rows = {"q": 8, "k": 4, "v": 4, "o": 8}
    fused, narrow = torch.zeros(8, width), torch.zeros(8, width // 2)
    plan: Plan = {}
    start = 0
    for name in ("q", "k", "v"):
        half = rows[name] // 2
        source = (worker * half * width, (half, width), (width, 1))
        piece = Piece(fused[start : start + half], source)
        plan[f"{name}.weight"] = Way((rows[name], width), [piece])
        start += half
    cut = (worker * width // 2, (8, width // 2), (width, 1))
    plan["o.weight"] = Way((8, width), [Piece(narrow, cut)])

    qkv = (fused, torch.ones(3 * room, width), torch.ones(8, room))
    o = (narrow, torch.ones(room, width // 2), torch.ones(8, room))
    sums = {"qkv": torch.zeros(0, width), "o": torch.zeros(8, width // 2)}
    for name, place in places(plan, [qkv, o]).items():
        part = name.removesuffix(".weight")
        a, b = torch.randn(rank, width), torch.randn(rows[part], rank)
        place.check(names_of(name), a, b)
        place.fill(a, b)
        whole, half = b @ a, rows[part] // 2
        if part == "o":
            sums["o"] = whole[:, worker * width // 2 :][:, : width // 2]
        else:
            sums["qkv"] = torch.cat([sums["qkv"], whole[worker * half :][:half]])

    # As kernels compute it: each part of B with its part of A, over all the room.
    blocks = zip(qkv[2].split([4, 2, 2]), qkv[1].split(room), strict=True)
    assert torch.allclose(torch.cat([b @ a for b, a in blocks]), sums["qkv"], atol=1e-6)
    assert torch.allclose(o[2] @ o[1], sums["o"], atol=1e-6)


def test_a_layer_that_is_fused_in_another_way_takes_no_adapter() -> None:
    weight = torch.zeros(8, 8)
    plan: Plan = {"qkv.weight": Way((8, 8), [Piece(weight, (0, (8, 8), (8, 1)))])}
    assert places(plan, [(weight, torch.zeros(9, 8), torch.zeros(8, 3))]) == {}


def test_a_model_that_computes_further_weights_takes_no_adapter() -> None:
    """Its weights have no plan, since they go through the model's loader each time."""
    sentence = r"(?s)computes further weights of this model.*set:  rollout\.max_lora_rank=0"
    with pytest.raises(WeightSyncError, match=sentence):
        plan_beneath(torch.nn.Linear(1, 1))
