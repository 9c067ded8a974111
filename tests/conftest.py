"""Fixtures of the tests that cross packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Qwen2 of tied embeddings, and its tokenizer with a chat
    template. Nobody writes into it.
    """
    from coupler.testing.models import write_qwen2

    return write_qwen2(tmp_path_factory.mktemp("qwen2"), tied=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two nodes, which this process has joined."""
    from coupler.executors.environment import of_ray

    with of_ray(starts=True):
        import ray
        from ray.cluster_utils import Cluster

        nodes = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
        )
        nodes.add_node(num_cpus=4)
        ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()
