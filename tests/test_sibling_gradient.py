"""engine=fsdp has one gradient for a trajectory in one row and in several, whatever its
micro-batches are, under algorithms that read whole sequences.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.interfaces import Algorithm, Model, Output, Rank
from coupler.loop.loss_weight import prepare, step_info
from coupler.testing.models import NUM_SPECIAL, VOCAB, write_qwen2
from coupler.worker.train_infer import checked_loss
from coupler_algos.config import KL, GRPOConfig, RLOOConfig
from coupler_algos.grpo import GRPO
from coupler_algos.rloo import RLOO
from coupler_algos.slots import Ratio
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine

LENGTH, TURNS, TRAJECTORIES = 12, 3, 4
# Of each row, the tokens of its three turns.
TURN_OF = np.array([-1, -1, 0, 0, -1, 1, 1, 1, -1, 2, 2, 2])
ALGORITHMS = {
    "gspo": GRPO(GRPOConfig(kl=KL.NONE, ratio=Ratio.GEOMETRIC)),
    "rloo, corrected": RLOO(RLOOConfig(kl=KL.NONE, correction_cap=1.5)),
    "rejected, measured": GRPO(
        GRPOConfig(kl=KL.NONE, reject={"sequence_mean_k3": 0.05}, log_mismatch=True)
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2(tmp_path_factory.mktemp("models") / "model", tied=True)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Batch:
    """Two groups of two trajectories in a row each, whose policy moved a little since
    they were sampled.
    """
    random, total = np.random.default_rng(5), LENGTH * TRAJECTORIES
    mask = np.tile(TURN_OF >= 0, TRAJECTORIES)
    tokens = random.integers(NUM_SPECIAL, VOCAB, total).astype(np.int32)
    bare = Batch(np.full(TRAJECTORIES, LENGTH), {"tokens": tokens, "loss_mask": mask})
    now = engine(folder, 10**4).forward(bare, (Output("logprobs"),))["logprobs"]

    numbers = np.array([40, 41, 42, 43])
    moved = [np.where(mask, now + random.normal(0, 0.2, total), 0) for _ in range(2)]
    return bare.with_tokens(
        version=np.where(mask, 0, -1).astype(np.int32),
        old_logprobs=moved[0].astype(np.float32),
        rollout_logprobs=moved[1].astype(np.float32),
    ).with_seqs(
        reward=np.array([1.0, 0.0, 0.25, 1.0], np.float32),
        group=np.array([3, 3, 8, 8]),
        trajectory=numbers,
        unit=numbers,
    )


@pytest.fixture(scope="module")
def siblings(whole: Batch) -> Batch:
    """The same, where each turn is trained in a row of its own, in any order."""
    rows = np.random.default_rng(6).permutation(np.arange(TRAJECTORIES * TURNS))
    split = whole.take(rows // TURNS)
    turn = np.tile(TURN_OF, len(rows)) == split.spread(rows % TURNS)
    return split.with_tokens(loss_mask=turn)


def engine(folder: Path, max_tokens: int) -> FSDPEngine:
    made = FSDPEngine(FSDPConfig(dtype="fp32", max_tokens_per_gpu=max_tokens), Model(str(folder)))
    made.setup(Rank())
    return made


def gradient(
    folder: Path, algorithm: Algorithm, batch: Batch, max_tokens: int
) -> dict[str, np.ndarray]:
    trained = engine(folder, max_tokens)
    batch = prepare(algorithm.advantages(batch), algorithm)
    loss = checked_loss(algorithm, None)
    trained.forward_backward(batch, algorithm.want, loss, step_info(batch, 0))
    return {name: np.array(grad.detach().cpu()) for name, grad in trained.gradients()}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_siblings_have_the_gradient_of_one_row(
    folder: Path, whole: Batch, siblings: Batch, name: str
) -> None:
    algorithm = ALGORITHMS[name]
    want = gradient(folder, algorithm, whole, 10**4)
    scale = max(np.abs(grad).max() for grad in want.values())
    assert scale > 1e-3

    # In a micro-batch: all siblings, those of two trajectories, and those of one.
    for max_tokens in (10**4, 2 * TURNS * LENGTH, TURNS * LENGTH):
        got = gradient(folder, algorithm, siblings, max_tokens)
        off = max(np.abs(got[key] - grad).max() for key, grad in want.items())
        assert off < 1e-5 * scale, (max_tokens, off, scale)


def test_a_trajectory_has_to_fit_only_where_it_is_read_as_a_whole(
    folder: Path, siblings: Batch
) -> None:
    with pytest.raises(CouplerError, match="3 rows that the loss reads together"):
        gradient(folder, ALGORITHMS["gspo"], siblings, 2 * LENGTH)
    assert gradient(folder, GRPO(GRPOConfig(kl=KL.NONE)), siblings, LENGTH)
