"""Engines leave their process: the last one takes the process group and Megatron's
groups with it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch.distributed as dist
from families import References
from megatron.core import parallel_state
from ranks import Arrays, on_ranks

from coupler.batch import Batch
from coupler.interfaces import Model, Output, Rank
from coupler.testing.cases import make_batch
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine


def started(rank: Rank, model: str) -> MegatronEngine:
    engine = MegatronEngine(MegatronConfig(), Model(model))
    engine.setup(rank)
    return engine


def close_and_start_again(rank: Rank, model: str, path: str) -> Arrays:
    """Close two engines, one after the other, and run a third."""
    batch, want = Batch.load(Path(path)), (Output("logprobs"),)
    engines = [started(rank, model), started(rank, model)]
    before = engines[0].forward(batch, want)["logprobs"]
    there = []
    for engine in engines:
        engine.close()
        engine.close()
        there.append([dist.is_initialized(), parallel_state.model_parallel_is_initialized()])
    again = started(rank, model).forward(batch, want)["logprobs"]
    return {"there": np.array(there), "before": before, "again": again}


def test_the_last_engine_of_a_process_destroys_its_groups(
    reference_of: References, tmp_path: Path
) -> None:
    reference = reference_of("llama")
    make_batch(reference).save(tmp_path / "batch.npz")
    arguments = {"model": str(reference.folder), "path": str(tmp_path / "batch.npz")}
    (found,) = on_ranks("test_close:close_and_start_again", 1, tmp_path / "ranks", **arguments)
    np.testing.assert_array_equal(found["there"], [[True, True], [False, False]])
    np.testing.assert_array_equal(found["again"], found["before"])
