"""One engine for the tests of a file: a start takes half a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.models import write_qwen2
from coupler.testing.reference import TransformersReference


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


@pytest.fixture(scope="module")
def start(reference: TransformersReference) -> Iterator[Callable[..., Served]]:
    """Start a replica with these settings and no weights."""
    from coupler.interfaces import Model
    from coupler_rollout_vllm.config import VLLMConfig
    from coupler_rollout_vllm.rollout import VLLMRollout

    served: list[Served] = []

    def make(transport: str = "tcp", **settings: object) -> Served:
        config = VLLMConfig(dtype="fp32", **settings)  # type: ignore[arg-type]
        backend = Plugins.load().get("transport", transport)
        served.append(Served(VLLMRollout(config, Model(str(reference.folder))), backend))
        return served[-1]

    yield make
    for each in served:
        each.close()


@pytest.fixture(scope="module")
def served(start: Callable[..., Served], reference: TransformersReference) -> Served:
    """A replica with the true weights, running."""
    one = start()
    one.push((name, torch.from_numpy(tensor)) for name, tensor in reference.tensors.items())
    return one
