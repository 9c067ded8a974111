"""Experts: routes and the routers' own losses in every layout, against closed forms in
float64; frozen routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import References, Start, shards

from coupler.batch import Batch
from coupler.interfaces import Model, Output, Part, Rank, StepInfo
from coupler.metrics import Metrics
from coupler.testing import losses
from coupler.testing.cases import LENGTHS, make_batch, weighted
from coupler.testing.conformance.test_engine import assert_gradient
from coupler.testing.conformance.test_routing import BOTH, disturbed
from coupler.testing.ranks import Arrays, World, as_array
from coupler.testing.reference import Gradient, TransformersReference, as_saved
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine

SURROGATE = "coupler.testing.losses:surrogate"
BALANCE, Z = 0.3, 0.01
LOSSES = {"moe_aux_loss_coeff": BALANCE, "moe_z_loss_coeff": Z}
LAYOUTS: dict[
    str, tuple[int, dict[str, Any]]
] = {  # (ranks, settings); whole batch in one micro-batch unless it says
    "one-a-micro-batch": (1, {"max_tokens_per_gpu": max(LENGTHS)}),
    "two-a-micro-batch": (1, {"max_tokens_per_gpu": 2 * max(LENGTHS)}),
    "all-at-once": (1, {}),
    "nothing-again": (1, {"gradient_checkpointing": "none", "max_tokens_per_gpu": 28}),
    "attention-again": (1, {"gradient_checkpointing": "selective"}),
    "dp2": (2, {"max_tokens_per_gpu": 28}),
    "dp4": (4, {}),
    "tp2": (2, {"tensor_parallel": 2, "max_tokens_per_gpu": 28}),
    "cp2": (2, {"context_parallel": 2, "max_tokens_per_gpu": 14}),
    "pp2": (2, {"pipeline_parallel": 2, "max_tokens_per_gpu": 14}),
    "ep2": (2, {"expert_parallel": 2}),
    "ep2-cp2": (2, {"expert_parallel": 2, "context_parallel": 2}),
    "tp2-etp2": (2, {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
    "ep2-pp2-vpp2": (
        4,
        {
            "expert_parallel": 2,
            "pipeline_parallel": 2,
            "virtual_pipeline": 2,
            "max_tokens_per_gpu": 14,
        },
    ),
    "tp2-cp2": (
        4,
        {
            "tensor_parallel": 2,
            "context_parallel": 2,
            "expert_parallel": 4,
            "max_tokens_per_gpu": 14,
        },
    ),
}
# Larger layouts contain them.
PARTS = dict.fromkeys(("tp2", "cp2", "pp2"), pytest.mark.slow)


def routed_apart(batch: Batch, reference: TransformersReference) -> Batch:
    """With routes that are not the router's, for most tokens."""
    return weighted(disturbed(batch, reference))


def expected(
    batch: Batch, reference: TransformersReference, ranks: int = 1
) -> tuple[Gradient, Mapping[str, float]]:
    """The gradient of the loss with those of the routers, and the metrics of the latter
    on so many ranks of experts.
    """
    main = reference.gradient(batch, losses.surrogate)
    model, number = reference.model, len(reference._routers)
    # logits of a layer, and the experts that are chosen in the end
    found: list[torch.Tensor] = []
    hooks = []
    for name, part in model.named_modules():
        if name.endswith("mlp.gate"):
            hooks.append(part.register_forward_hook(lambda _m, _a, out: found.append(out[0])))
        elif name.endswith("mlp.experts"):
            hooks.append(part.register_forward_pre_hook(lambda _m, a: found.append(a[1])))
    model.zero_grad()
    balance, z, total = 0.0, 0.0, batch.num_tokens
    experts = model.config.num_local_experts
    counts = torch.zeros(number, experts)
    for i in range(len(batch)):
        one = batch.take([i])
        found.clear()
        reference._out(one)
        for layer, (logits, chosen) in enumerate(zip(found[::2], found[1::2], strict=True)):
            load = torch.zeros(experts).index_add(0, chosen.flatten(), torch.ones(chosen.numel()))
            counts[layer] += load
            fraction = load * experts / (chosen.shape[1] * one.num_tokens)
            sigmoid = model.config.model_type == "deepseek_v3"
            scores = (
                logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
                if sigmoid
                else logits.softmax(1)
            )
            balance = balance + one.num_tokens / total * (fraction * scores.mean(0)).sum()
            z = z + logits.logsumexp(1).square().sum() / total
    (BALANCE * balance + Z * z).backward()
    for hook in hooks:
        hook.remove()
    grads: Arrays = {}
    for name, p in model.named_parameters():
        grads |= as_saved(
            name, np.zeros(tuple(p.shape)) if p.grad is None else p.grad.numpy().copy()
        )
    metrics = {
        "moe/aux_loss": float(balance) / number,
        "moe/z_loss": float(z) / number,
        "moe/max_load": float((counts.amax(1) / counts.mean(1)).mean()),
    }
    if ranks > 1:
        apart = counts.unflatten(1, (ranks, experts // ranks)).sum(2)
        metrics["moe/max_rank_load"] = float((apart.amax(1) / apart.mean(1)).mean())
    return Gradient(
        {name: grad + grads.get(name, 0) for name, grad in main.grads.items()}, main.metrics
    ), metrics


def assert_metrics(got: Metrics, want: Mapping[str, float]) -> None:
    assert {name: got[name].value for name in want} == pytest.approx(want, rel=1e-5)


def assert_same_bits(world: World, parts: list[Batch], reference: TransformersReference) -> None:
    done = world.forward(parts, BOTH)
    for part, first in zip(parts, done, strict=True):
        np.testing.assert_array_equal(
            np.sort(first["routed_experts"], 2), np.sort(reference.routes(part), 2)
        )
    known = [
        part.with_tokens(routed_experts=first["routed_experts"])
        for part, first in zip(parts, done, strict=True)
    ]
    for first, again in zip(done, world.forward(known, ("logprobs",)), strict=True):
        np.testing.assert_array_equal(again["logprobs"], first["logprobs"])


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=PARTS.get(name, ())) for name in LAYOUTS]
)
def test_routes_and_losses_do_not_depend_on_the_layout(
    layout: str, reference_of: References, start: Start
) -> None:
    """Law 1 for the routers' own losses too, with routes that are replayed, and with
    the routers' own.
    """
    reference, (ranks, settings) = reference_of("moe"), LAYOUTS[layout]
    world = start(
        reference.folder, ranks, **{"max_tokens_per_gpu": 200, "lr": 1e-30, **LOSSES, **settings}
    )
    batch = weighted(make_batch(reference))
    assert_same_bits(world, shards(batch, world), reference)
    for each in (batch, routed_apart(batch, reference)):
        grads, metrics, steps = world.gradient(shards(each, world), SURROGATE)
        want, facts = expected(each, reference, settings.get("expert_parallel", 1))
        assert_gradient(grads, want)
        assert_metrics(metrics, facts)
        assert ("moe/max_rank_load" in metrics) == ("moe/max_rank_load" in facts)
        assert steps[0][1] == pytest.approx(want.norm, rel=1e-4)
        replayed = each.has("routed_experts")
        assert ("moe/route_disagreement" in metrics) == replayed
    # nearly all others than the router's
    assert metrics["moe/route_disagreement"].value > 0.9


@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, {}), (2, {"expert_parallel": 2, "context_parallel": 2})]
)
def test_a_router_of_sigmoids_with_a_bias_replays(
    ranks: int, settings: dict[str, Any], reference_of: References, start: Start
) -> None:
    """DeepSeek-V3's, which looks for experts in some groups of them only; the first
    layer has none.
    """
    reference = reference_of("latent-yarn")
    world = start(reference.folder, ranks, lr=1e-30, **LOSSES, **settings)
    batch = weighted(make_batch(reference))
    assert_same_bits(world, shards(batch, world), reference)
    routes = (reference.routes(batch) + 3) % reference.model.config.num_local_experts
    other = batch.with_tokens(routed_experts=routes.astype(np.int16))
    grads, metrics, _ = world.gradient(shards(other, world), SURROGATE)
    want, facts = expected(other, reference)
    assert_gradient(grads, want)
    assert_metrics(metrics, facts)
    assert metrics["moe/route_disagreement"].value > 0.5


def test_the_own_routes_do_not_disagree(reference_of: References, start: Start) -> None:
    reference = reference_of("moe")
    batch = weighted(make_batch(reference))
    batch = batch.with_tokens(routed_experts=reference.routes(batch))
    _, metrics, _ = start(reference.folder).gradient([batch], SURROGATE)
    assert metrics["moe/route_disagreement"].value == 0
    assert "moe/aux_loss" not in metrics, "it is not in the loss"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_frozen_router_stays(
    ranks: int, reference_of: References, start: Start, tmp_path: Path
) -> None:
    """It has no gradient, no step moves it, and it is exported and saved like
    everything else.
    """
    reference = reference_of("moe")
    batch = weighted(make_batch(reference))
    world = start(reference.folder, ranks, freeze_moe_router=True, lr=1e-2)
    grads, _, _ = world.gradient(shards(batch, world), SURROGATE)
    routers = {name for name in grads if name.endswith("mlp.gate.weight")}
    want = reference.gradient(batch, losses.surrogate)
    assert routers and not any(grads[name].any() for name in routers)
    assert_gradient(
        grads,
        Gradient(
            {**want.grads, **{n: np.zeros_like(want.grads[n]) for n in routers}}, want.metrics
        ),
    )
    world.save(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    resumed = start(reference.folder, 1, freeze_moe_router=True)
    resumed.load(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    for weights in (world.weights(), resumed.weights()):
        for name, before in reference.tensors.items():
            assert np.array_equal(weights[name], before) == (name in routers), name


def test_a_frozen_router_is_no_part_of_the_optimizer(reference_of: References) -> None:
    reference = reference_of("moe")
    engine = MegatronEngine(MegatronConfig(freeze_moe_router=True), Model(str(reference.folder)))
    engine.setup(Rank())
    batch = weighted(make_batch(reference))
    info = StepInfo(batch.num_tokens, 0)
    engine.forward_backward(batch, (Output("logprobs"), Output("entropy")), losses.surrogate, info)
    for router in engine.routers.routers:
        assert router.weight.grad is None and not hasattr(router.weight, "main_grad")
    exported = {name: as_array(tensor) for name, tensor in engine.weights()}
    assert exported.keys() == reference.tensors.keys()
