"""engine=megatron trains as engine=fsdp does: the same model, data and seeds, however
its ranks split the work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.interfaces import Columns
from coupler.metrics import Metric, Metrics
from coupler.plugins.manager import Plugins
from coupler.testing import losses
from coupler.testing.cases import make_batch, weighted
from coupler.testing.models import rewrite, write_qwen2, write_qwen3_moe
from coupler.testing.ranks import World
from coupler.testing.reference import TransformersReference
from coupler.testing.subject import Subject

STEPS = 20
LAYOUTS = {  # (model, ranks, settings)
    "dp2": ("dense", 2, {}),
    "tp2": ("dense", 2, {"tensor_parallel": 2}),
    "pp2": ("dense", 2, {"pipeline_parallel": 2}),
    "cp2": ("dense", 2, {"context_parallel": 2}),
    "tp2-pp2": ("dense", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "moe-ep2": ("moe", 2, {"expert_parallel": 2}),
    "moe-tp2-ep2": ("moe", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
}
# Others have these parts too.
PARTS = dict.fromkeys(("tp2", "pp2", "moe-ep2"), pytest.mark.slow)
References = Callable[[str], TransformersReference]


def surrogate(out: Columns, batch: Columns) -> tuple[object, Metrics]:
    """The kit's loss, and what it adds up to."""
    token_loss, metrics = losses.surrogate(out, batch)
    return token_loss, {
        **metrics,
        "loss": Metric((token_loss.detach() * batch["loss_weight"]).sum(), how="sum"),
    }


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> References:
    @cache
    def make(name: str) -> TransformersReference:
        folder = tmp_path_factory.mktemp(name)
        return TransformersReference(
            write_qwen3_moe(folder) if name == "moe" else write_qwen2(folder, tied=False)
        )

    return make


def batches(reference: TransformersReference, number: int = STEPS) -> list[Batch]:
    return [weighted(make_batch(reference, seed=seed)) for seed in range(number)]


def trained(
    engine: str, reference: TransformersReference, ranks: int, folder: Path, **more: object
) -> np.ndarray:
    """[2, STEPS] losses and gradient norms."""
    subject = Subject(Plugins.load().get("engine", engine))
    settings = {"lr": 1e-3, "dtype": "fp32", "max_tokens_per_gpu": 28, **more}
    folder.mkdir()
    world = World(subject.recipe(reference.folder, **settings), ranks, folder)
    done = []
    for index, batch in enumerate(batches(reference)):
        shards = [batch.take(rows) for rows in batch.partition(world.layout.num_shards)]
        _, metrics, steps = world.gradient(shards, f"{__file__}:surrogate", index=index)
        done.append((metrics["loss"].value, steps[0][1]))
    world.close()
    return np.array(done).T


@pytest.fixture(scope="module")
def alone(
    reference_of: References, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], np.ndarray]:
    """One rank of FSDP."""

    @cache
    def train(name: str) -> np.ndarray:
        return trained("fsdp", reference_of(name), 1, tmp_path_factory.mktemp("fsdp") / "world")

    return train


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=PARTS.get(name, ())) for name in LAYOUTS]
)
def test_losses_and_the_first_gradient_are_equal(
    layout: str, alone: Callable[[str], np.ndarray], reference_of: References, tmp_path: Path
) -> None:
    name, ranks, settings = LAYOUTS[layout]
    found, norms = trained("megatron", reference_of(name), ranks, tmp_path / "world", **settings)
    want, want_norms = alone(name)
    assert np.abs(want - want[0]).max() > 0.05 * np.abs(want).max(), (
        "the losses hardly differ: nothing is compared"
    )
    np.testing.assert_allclose(found, want, rtol=1e-3)
    assert norms[0] == pytest.approx(want_norms[0], rel=1e-3)


def test_what_one_engine_exports_the_other_trains_on(
    reference_of: References, tmp_path: Path
) -> None:
    """Two steps on TP2 x PP2, its weights in a Hugging Face folder, and the same
    log-probs from FSDP.
    """
    plugins, worlds, reference = Plugins.load(), [], reference_of("dense")
    *first, last = batches(reference, 3)

    def start(engine: str, folder: Path, ranks: int, **more: object) -> World:
        place = tmp_path / engine
        place.mkdir()
        settings = {"lr": 1e-2, "dtype": "fp32", **more}
        worlds.append(
            World(Subject(plugins.get("engine", engine)).recipe(folder, **settings), ranks, place)
        )
        return worlds[-1]

    split = start("megatron", reference.folder, 4, tensor_parallel=2, pipeline_parallel=2)
    for index, batch in enumerate(first):
        split.gradient([batch], f"{__file__}:surrogate", index=index)
    folder = rewrite(reference.folder, tmp_path / "export", split.weights())
    whole = start("fsdp", folder, 1)
    (want,), (got,) = (world.forward([last], ("logprobs",)) for world in (split, whole))
    np.testing.assert_allclose(got["logprobs"], want["logprobs"], atol=5e-5)
    assert np.abs(want["logprobs"] - reference.outputs(last)["logprobs"]).max() > 1e-2, (
        "nothing was trained"
    )
    for world in worlds:
        world.close()
