"""``train_infer/*``: how far the log-probs of engine and rollout are apart, on tokens
of the current weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy_run import ToyRun, small

from coupler.batch import Batch
from coupler.config.schema import OnSync, SyncConfig
from coupler.loop.turns import turns_of
from coupler.metrics import merge, values
from coupler.worker.train_infer import OF_REPLICA, mismatch

TRAIN = np.log(np.array([0.2, 0.5, 0.3, 0.9, 0.6]))
INFER = np.log(np.array([0.4, 0.4, 0.3, 0.1, 0.0001]))
COLUMNS = {
    "rollout_logprobs": INFER,
    "version": np.array([3, 3, 3, 2, 3]),  # the fourth was sampled by other weights
    "loss_mask": np.array([True, True, True, True, False]),  # the fifth is of a prompt
}


def of(rows: slice) -> dict[str, np.ndarray]:
    return {name: column[rows] for name, column in COLUMNS.items()}


def test_they_are_the_closed_form_over_micro_batches() -> None:
    parts = [
        mismatch({"logprobs": TRAIN[rows]}, of(rows), 3)
        for rows in (slice(0, 1), slice(1, 5), slice(5, 5))
    ]
    ratio = np.array([0.5, 1.25, 1.0])
    assert values(merge(parts)) == pytest.approx(
        {
            "train_infer/ratio": ratio.mean(),
            "train_infer/ratio_max": 1.25,
            "train_infer/kl": (ratio - 1 - np.log(ratio)).mean(),
            "train_infer/abs_diff": abs(np.log(ratio)).mean(),
            "train_infer/abs_diff_max": np.log(2),
        }
    )


def test_each_replica_has_a_mean_of_its_own() -> None:
    """Sequences of 2, 2 and 1 tokens, of replicas 1, 0 and 1; replica 2 of three
    sampled nothing.
    """
    of_sequences = {"seq": np.array([0, 0, 1, 1, 2]), "replica": np.array([1, 0, 1])}
    found = values(mismatch({"logprobs": TRAIN}, {**COLUMNS, **of_sequences}, 3, num_replicas=3))
    assert found[f"{OF_REPLICA}1"] == pytest.approx((np.log(2) + np.log(1.25)) / 2)
    assert found[f"{OF_REPLICA}0"] == 0 and f"{OF_REPLICA}2" not in found


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_engines_of_either_kind_of_array_get_the_same(framework: str) -> None:
    out, columns = {"logprobs": TRAIN}, COLUMNS
    if framework == "torch":
        torch = pytest.importorskip("torch")
        out = {"logprobs": torch.from_numpy(TRAIN).requires_grad_()}
        columns = {name: torch.from_numpy(column) for name, column in COLUMNS.items()}
    found = mismatch(out, columns, 3)
    assert float(found["train_infer/ratio"].value) == pytest.approx(2.75 / 3)
    assert all(not getattr(metric.total, "requires_grad", False) for metric in found.values())


def test_nothing_is_said_of_weights_that_a_step_has_changed() -> None:
    assert mismatch({"logprobs": TRAIN}, COLUMNS, None) == {}
    assert mismatch({"logprobs": TRAIN}, of(slice(0, 5)), 4)["train_infer/ratio"].weight == 0


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_logs_them_every_step(tmp_path: Path, max_staleness: int) -> None:
    """Of the batch, or of tokens sampled for that where all of it is older than the
    last sync.
    """
    log = ToyRun(tmp_path, small(steps=6, max_staleness=max_staleness)).run()
    assert len(log) == 7
    for step in log[1:]:
        assert (
            step["train_infer/ratio"]
            == pytest.approx(1)
            == pytest.approx(step["train_infer/ratio_max"])
        )
        assert 0 <= step["train_infer/kl"] < 1e-9


@pytest.mark.parametrize(
    ("in_flight", "third_row"), [(OnSync.RECOMPUTE, [2, 3, 3]), (OnSync.STALE_KV, [2, 2, 2])]
)
def test_a_token_on_a_stale_cache_is_of_the_weights_that_made_it(
    in_flight: OnSync, third_row: list[int]
) -> None:
    """The third row went on after an update, the second is new, and nothing sampled the
    first.
    """
    version = np.array([-1, -1, -1, 3, -1, 2, 3, 3], np.int32)
    batch = Batch(np.array([2, 2, 4]), {"version": version})
    config = small(max_staleness=1, sync=SyncConfig(in_flight=in_flight))
    turn = turns_of(config, ["policy"], 1, batch, 3)["policy"]
    assert turn.batch["version"].tolist() == [-1, -1, -1, 3, -1, *third_row]
    assert turn.batch["version"].dtype == version.dtype
