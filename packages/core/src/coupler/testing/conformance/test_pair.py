"""Check what an engine and a rollout must do together, for every pair, since both meet
at checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.engine_kit.lora_names import random_like
from coupler.interfaces import Engine, Output, Rank, Request, SendReceipt, StepInfo, SyncReceipt
from coupler.plugins.manager import Plugins
from coupler.testing import expect, losses
from coupler.testing.cases import make_batch, weighted
from coupler.testing.conformance.test_rollout import generate
from coupler.testing.edge import Served
from coupler.testing.reference import Reference, as_batch
from coupler.testing.subject import Subject

# Mean |log-prob difference| in nats that is allowed, by the dtype that travels.
LIMIT = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
WANT = (Output("logprobs"), Output("entropy"))
Push = Callable[[Engine, Served], tuple[SendReceipt, SyncReceipt]]


@pytest.fixture
def adapting(engine_subject: Subject, rollout_subject: Subject) -> None:
    """Skip a pair that sends no adapters, before it starts."""
    if lacking := [str(s) for s in (engine_subject, rollout_subject) if not s.has("weights:lora")]:
        pytest.skip(f"{' and '.join(lacking)} without weights:lora under these settings")


@pytest.fixture(scope="module")
def live(
    engine_subject: Subject, rollout_subject: Subject, reference: Reference
) -> Iterator[Served]:
    """Start the rollout once for all tests of a model: a start may take half a
    minute.
    """
    if engine_subject.ranks_for(1) > 1:
        pytest.skip(
            f"{engine_subject} takes several ranks; what it sends is tested in test_engine.py"
        )
    served = Served(
        rollout_subject.create(reference.folder), Plugins.load().get("transport", "disk")
    )
    yield served
    served.close()


@pytest.fixture
def pair(engine_subject: Subject, live: Served, reference: Reference) -> tuple[Engine, Served]:
    engine = engine_subject.create(reference.folder, lr=3e-2)
    engine.setup(Rank(seed=1))
    return engine, live


def limit(engine: Engine, tolerance: float) -> float:
    """Return the allowed difference by the least precise dtype that is sent."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for _, tensor in engine.weights()}
    return max(tolerance, *(LIMIT[dtype] for dtype in dtypes))


def sample(served: Served, version: int) -> list[Batch]:
    """Sample completions at three temperatures, each with the log-probs that the
    rollout reports.
    """
    requests = [Request((7, 8 + i, 9), 10, t, seed=i) for i, t in enumerate((1.0, 0.7, 1.0, 1.3))]
    batches = []
    for request, done in zip(requests, generate(served, requests), strict=True):
        expect.same(set(done.versions), {version}, "the versions of the tokens")
        batch = as_batch(request.prompt, done.tokens, request.temperature)
        reported = np.array([0.0] * len(request.prompt) + list(done.logprobs), np.float32)
        batches.append(batch.with_tokens(rollout_logprobs=reported))
    return batches


def difference(engine: Engine, samples: list[Batch]) -> float:
    """Return the mean |log-prob difference| of engine and rollout on the same ids."""
    batch = Batch.concat(samples)
    ours = engine.forward(batch, (Output("logprobs"),))["logprobs"]
    return float(np.abs(ours - batch["rollout_logprobs"])[batch["loss_mask"]].mean())


def follow(pair: tuple[Engine, Served], reference: Reference, tolerance: float, push: Push) -> None:
    """Check after each of three steps: log-probs on the same ids are equal, every token
    has the new version, and they visibly moved.
    """
    engine, served = pair
    bound = limit(engine, tolerance)
    before: list[Batch] = []

    for step in range(4):
        sent, receipt = push(engine, served)
        expect.same(receipt.num_loaded, sent.num_tensors, "the number of tensors that were loaded")
        expect.same((receipt.missing, receipt.unexpected), ((), ()), "(missing, unexpected)")
        samples = sample(served, served.edge.version)
        expect.below(
            difference(engine, samples),
            bound,
            f"the mean log-prob difference of engine and rollout at version {served.edge.version}",
        )
        if before:
            assert difference(engine, before) > 3 * bound, (
                "the step changed too little for this test to see"
            )
        before = samples
        batch = weighted(make_batch(reference, seed=step))
        engine.forward_backward(batch, WANT, losses.surrogate, StepInfo(batch.num_tokens, step))
        expect.holds(engine.step().applied, f"step {step} to be applied, it was skipped")

    assert difference(engine, before) > 3 * bound, "without a sync the rollout cannot follow"


def test_the_rollout_runs_the_weights_just_trained(
    pair: tuple[Engine, Served], reference: Reference, every_model: None, tolerance: float
) -> None:
    follow(pair, reference, tolerance, lambda engine, served: served.push(engine.weights()))


def test_the_rollout_runs_the_adapter_just_trained(
    adapting: None,
    pair: tuple[Engine, Served],
    reference: Reference,
    every_model: None,
    tolerance: float,
) -> None:
    """The base weights come once. A random adapter shows, since the true one is 0
    before the first step.
    """
    engine, served = pair
    served.push(engine.base_weights())
    altered = ((name, random_like(name, tensor)) for name, tensor in engine.adapter_weights())
    served.push(altered, adapter=True, permuted=True)

    assert difference(engine, sample(served, served.edge.version)) > 3 * limit(engine, tolerance), (
        "no adapter runs"
    )
    follow(
        pair,
        reference,
        tolerance,
        lambda engine, served: served.push(engine.adapter_weights(), adapter=True),
    )


def test_the_first_version_is_the_checkpoint(
    pair: tuple[Engine, Served], reference: Reference, tolerance: float
) -> None:
    engine, served = pair
    served.push(engine.weights())
    for one in sample(served, served.edge.version):
        want = reference.outputs(one)["logprobs"]
        off = np.abs(want - one["rollout_logprobs"])[one["loss_mask"]].mean()
        expect.below(
            off, limit(engine, tolerance), "the mean log-prob difference from the checkpoint"
        )
