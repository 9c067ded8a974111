"""Every option of the optimizer and its schedule has an effect; what it remembers can
leave the device.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coupler.interfaces import Model, Output, Part, Rank, StepInfo
from coupler.testing import losses
from coupler.testing.cases import make_batch, weighted
from coupler.testing.models import write_qwen2
from coupler.testing.ranks import as_array
from coupler.testing.reference import TransformersReference
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine

WANT = (Output("logprobs"), Output("entropy"))
PLAIN = {"lr": 1e-2, "max_grad_norm": 0.0}
OPTIONS = {
    "lr": 2e-2,
    "beta1": 0.5,
    "beta2": 0.9,
    "eps": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 1e-4,
    "warmup_steps": 10,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> TransformersReference:
    return TransformersReference(write_qwen2(tmp_path_factory.mktemp("model"), tied=False))


def engine(reference: TransformersReference, **settings: object) -> MegatronEngine:
    made = MegatronEngine(MegatronConfig(**{**PLAIN, **settings}), Model(str(reference.folder)))
    made.setup(Rank())
    return made


def train(made: MegatronEngine, reference: TransformersReference, steps: int = 2) -> list[float]:
    """Learning rates of the steps."""
    rates = []
    for index in range(steps):
        batch = weighted(make_batch(reference, seed=index))
        made.forward_backward(batch, WANT, losses.surrogate, StepInfo(batch.num_tokens, index))
        rates.append(made.step().lr)
    return rates


def weights(made: MegatronEngine) -> dict[str, np.ndarray]:
    return {name: as_array(tensor) for name, tensor in made.weights()}


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_changes_what_two_steps_do(key: str, reference: TransformersReference) -> None:
    plain, other = engine(reference), engine(reference, **{key: OPTIONS[key]})
    for each in (plain, other):
        train(each, reference)
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.abs(weights(plain)[name] - weights(other)[name]).max() > 1e-5


def test_a_gradient_is_copied_to_the_host_where_there_is_one(
    reference: TransformersReference,
) -> None:
    """Between a pass and its step; before and after there are zeros, of which nothing
    is kept.
    """
    made, still = engine(reference), engine(reference)
    batch, grads = weighted(make_batch(reference)), frozenset({Part.GRADS})

    def moved() -> bool:
        """Whether anything was copied on the way to the host and back."""
        before = made._parked.copied
        made._park(grads)
        tensors, _ = made._held(Part.GRADS)["grads"]
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        made._unpark(grads)
        return made._parked.copied > before

    train(made, reference, 1)
    train(still, reference, 1)
    assert not moved() and not any(tensor.any() for tensor in made._held(Part.GRADS)["grads"][0])
    for each in (made, still):
        each.forward_backward(batch, WANT, losses.surrogate, StepInfo(batch.num_tokens, 1))
    assert moved()
    for each in (made, still):
        each.step()
    want = weights(still)
    for name, value in weights(made).items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)


def test_an_engine_that_leaves_prepares_memory_beside_its_first_step(
    reference: TransformersReference,
) -> None:
    made, still, every = engine(reference), engine(reference), frozenset(Part)
    made._park(every)
    made._unpark(every)
    for each in (made, still):
        train(each, reference, 1)
    allocated = made._parked.allocated
    made._park(every)
    made._unpark(every)
    assert made._parked.allocated == allocated > 0 and not still._parked.allocated

    want = weights(still)
    for name, value in weights(made).items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)


def test_a_saved_state_is_that_of_the_call(
    reference: TransformersReference, tmp_path: Path
) -> None:
    """Training goes on while a save is under way."""
    made = engine(reference)
    train(made, reference, 1)
    want = weights(made)
    pending = made.save(tmp_path, frozenset({Part.PARAMS, Part.OPTIMIZER}))
    train(made, reference, 2)
    pending.wait(60)
    read = engine(reference)
    read.load(tmp_path, frozenset({Part.PARAMS, Part.OPTIMIZER}))
    for name, value in weights(read).items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)
