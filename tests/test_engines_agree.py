"""engine=megatron trains as engine=fsdp does: the same model, data and seeds, however its ranks split the work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.interfaces import Columns
from coupler.metrics import Metric, Metrics
from coupler.plugins.manager import Plugins
from coupler.testing import losses
from coupler.testing.cases import make_batch, weighted
from coupler.testing.models import write_qwen2
from coupler.testing.ranks import World
from coupler.testing.reference import TransformersReference
from coupler.testing.subject import Subject

STEPS = 20
LAYOUTS = {
    "dp2": {},
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
RANKS = {"tp2-pp2": 4}


def surrogate(out: Columns, batch: Columns) -> tuple[object, Metrics]:
    """The kit's loss, and what it adds up to."""
    token_loss, metrics = losses.surrogate(out, batch)
    return token_loss, {**metrics, "loss": Metric((token_loss.detach() * batch["loss_weight"]).sum(), how="sum")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> TransformersReference:
    return TransformersReference(write_qwen2(tmp_path_factory.mktemp("model"), tied=False))


@pytest.fixture(scope="module")
def batches(reference: TransformersReference) -> list[Batch]:
    return [weighted(make_batch(reference, seed=seed)) for seed in range(STEPS)]


def trained(
    engine: str, reference: TransformersReference, batches: list[Batch], ranks: int, folder: Path, **more: object
):
    """[STEPS] losses and gradient norms."""
    subject = Subject(Plugins.load().get("engine", engine))
    settings = {"lr": 1e-3, "dtype": "fp32", "max_tokens_per_gpu": 28, **more}
    folder.mkdir()
    world = World(subject.recipe(reference.folder, **settings), ranks, folder)
    done = []
    for index, batch in enumerate(batches):
        shards = [batch.take(rows) for rows in batch.partition(world.layout.num_shards)]
        _, metrics, steps = world.gradient(shards, f"{__file__}:surrogate", index=index)
        done.append((metrics["loss"].value, steps[0][1]))
    world.close()
    return np.array(done).T


@pytest.fixture(scope="module")
def fsdp(
    reference: TransformersReference, batches: list[Batch], tmp_path_factory: pytest.TempPathFactory
) -> np.ndarray:
    return trained("fsdp", reference, batches, 1, tmp_path_factory.mktemp("fsdp") / "world")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_the_first_gradient_are_equal(
    layout: str, fsdp: np.ndarray, reference: TransformersReference, batches: list[Batch], tmp_path: Path
) -> None:
    ranks = RANKS.get(layout, 2)
    found, norms = trained("megatron", reference, batches, ranks, tmp_path / "world", **LAYOUTS[layout])
    want, want_norms = fsdp
    assert np.abs(want - want[0]).max() > 0.05 * np.abs(want).max(), "the losses hardly differ: nothing is compared"
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
    assert norms[0] == pytest.approx(want_norms[0], rel=1e-3)
