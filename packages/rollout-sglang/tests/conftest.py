"""One engine for the tests of all files: a start takes half a minute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.models import write_qwen2
from coupler.testing.reference import TransformersReference

STAND_IN = str(Path(__file__).parent / "stand_in")
"""The folder with a stand-in for SGLang's kernels, for the engine's processes."""


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Let SGLang find the stand-in where there is no GPU."""
    if not torch.cuda.is_available() and STAND_IN not in os.environ.get("PYTHONPATH", ""):
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [STAND_IN, *filter(None, [os.environ.get("PYTHONPATH")])]
        )


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> TransformersReference:
    """A small Qwen2 with tied embeddings, whose folder has sampling defaults that
    nobody may follow.
    """
    folder = write_qwen2(tmp_path_factory.mktemp("models") / "tied", tied=True)
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.1, "top_k": 1, "repetition_penalty": 3.0, "eos_token_id": [1, 2, '
        "3, 4, 5, 6, 7, 8]}"
    )
    return TransformersReference(folder)


@pytest.fixture(scope="session")
def start(kernels: None, reference: TransformersReference) -> Iterator[Callable[..., Served]]:
    """Start a replica with these settings and no weights."""
    from coupler.interfaces import Model
    from coupler_rollout_sglang.config import SGLangConfig
    from coupler_rollout_sglang.rollout import SGLangRollout

    served: list[Served] = []

    def make(transport: str = "tcp", **settings: object) -> Served:
        config = SGLangConfig(dtype="fp32", **settings)  # type: ignore[arg-type]
        backend = Plugins.load().get("transport", transport)
        served.append(Served(SGLangRollout(config, Model(str(reference.folder))), backend))
        return served[-1]

    yield make
    for each in served:
        each.close()


@pytest.fixture(scope="session")
def one(start: Callable[..., Served]) -> Served:
    return start()


@pytest.fixture
def served(one: Served, reference: TransformersReference) -> Served:
    """A replica with the true weights, running; one that a test killed starts again."""
    one.revive()
    one.push((name, torch.from_numpy(tensor)) for name, tensor in reference.tensors.items())
    return one
