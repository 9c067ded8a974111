"""Batch, balance, metrics, trajectory and loss weights: the arithmetic that everything
stands on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.batch.partition import balance, contiguous, micro_batches
from coupler.batch.trajectory import Origin, Segment, Trajectory, columns_of
from coupler.interfaces import Aggregation
from coupler.loop.loss_weight import loss_weight, prepare
from coupler.metrics import Metric, merge, values
from coupler.system.seeding import derive, stream
from coupler.testing.toy import ToyAlgorithm
from coupler.testing.toy_config import ToyAlgorithmConfig


def make(lengths: tuple[int, ...] = (3, 1, 0, 4)) -> Batch:
    total = sum(lengths)
    mask = np.ones(total, bool)
    starts = np.cumsum([0, *lengths])[:-1]
    mask[[s for s, n in zip(starts, lengths, strict=True) if n]] = False
    return Batch(
        np.array(lengths),
        {
            "tokens": np.arange(total, dtype=np.int32),
            "loss_mask": mask,
            "advantages": np.ones(total, np.float32),
        },
        {"reward": np.arange(len(lengths), dtype=np.float32)},
    )


def test_take_reorders_repeats_and_drops() -> None:
    taken = make().take([3, 0, 0])
    assert taken["tokens"].tolist() == [4, 5, 6, 7, 0, 1, 2, 0, 1, 2]
    assert taken["reward"].tolist() == [3, 0, 0]
    assert len(make().take([])) == 0


def test_concat_undoes_take() -> None:
    batch = make()
    again = Batch.concat([batch.take([0, 1]), batch.take([2, 3])])
    assert again["tokens"].tolist() == batch["tokens"].tolist()
    with pytest.raises(ValueError, match=r"\['advantages'\] are in some of them only"):
        Batch.concat([batch, batch.select("tokens", "loss_mask", "reward")])


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        (np.zeros(7), "has 7 rows, expected T=8"),
        (np.array(["a"] * 8, object), "holds Python objects"),
    ],
)
def test_columns_are_checked(tokens: np.ndarray, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make().with_tokens(tokens=tokens)


def test_a_missing_column_names_those_there_are() -> None:
    with pytest.raises(KeyError, match="no column 'value'; it has"):
        make()["value"]


def test_save_and_load(tmp_path: Path) -> None:
    batch = make()
    batch.save(tmp_path / "b.npz")
    loaded = Batch.load(tmp_path / "b.npz")
    assert loaded.tokens.keys() == batch.tokens.keys()
    for name in batch.tokens:
        assert loaded[name].dtype == batch[name].dtype
        assert loaded[name].tolist() == batch[name].tolist()


def test_partition_covers_every_row_once_and_keeps_units_together() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 50, 40)
    batch = Batch(
        lengths, {"tokens": np.zeros(lengths.sum(), np.int32)}, {"unit": np.arange(40) // 2}
    )
    shards = batch.partition(3)
    assert sorted(np.concatenate(shards).tolist()) == list(range(40))
    owner = {int(row): i for i, shard in enumerate(shards) for row in shard}
    assert all(owner[row] == owner[row + 1] for row in range(0, 40, 2))
    loads = [lengths[shard].sum() for shard in shards]
    assert max(loads) - min(loads) <= 2 * lengths.max()


@pytest.mark.parametrize("spread", [3, 300])
def test_prompt_groups_are_split_only_where_shards_would_differ(spread: int) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(300, 300 + spread, 40)
    columns = {"group": np.repeat(np.arange(8), 5), "unit": np.arange(40)}
    shards = Batch(lengths, {"tokens": np.zeros(lengths.sum(), np.int32)}, columns).partition(4)
    loads = [lengths[shard].sum() for shard in shards]
    assert max(loads) <= 1.02 * np.mean(loads)
    groups = [set(columns["group"][shard].tolist()) for shard in shards]
    assert (sum(map(len, groups)) == 8) == (spread == 3)


@pytest.mark.parametrize(("n", "k"), [(0, 3), (1, 1), (2, 5), (100, 7), (9000, 2), (9000, 40)])
def test_balance(n: int, k: int) -> None:
    weights = np.random.default_rng(n).lognormal(6, 1, n).astype(np.int64) + 1
    parts = balance(weights, k)
    assert len(parts) == k
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    loads = np.array([weights[part].sum() for part in parts])
    assert loads.max() <= max(weights.sum() / k * 1.001, weights.sum() / k + weights.max(initial=0))


@pytest.mark.parametrize("slack", [0.0, 1e-3, 0.1, 2.0])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 3), (5, 5), (100, 7), (2000, 2), (2000, 1000)])
def test_ranges_are_as_even_as_they_say(n: int, k: int, slack: float) -> None:
    weights = np.random.default_rng(n).integers(0, 100, n)
    weights[0] = 1
    parts = contiguous(weights, k, slack)
    if not parts:
        assert slack < 2
        return
    assert len(parts) == k
    assert np.concatenate(parts).tolist() == list(range(n))
    assert max(weights[part].sum() for part in parts) <= (1 + slack) * weights.sum() / k


def test_ranges_of_one_length_are_even() -> None:
    assert [part.tolist() for part in contiguous(np.full(6, 7), 3, 0.0)] == [[0, 1], [2, 3], [4, 5]]
    assert contiguous(np.array([1, 9, 1, 9]), 2, 0.0) and not contiguous(
        np.array([9, 9, 1, 1]), 2, 0.05
    )
    assert (
        contiguous(np.zeros(3, np.int64), 2, 0.0) == contiguous(np.zeros(0, np.int64), 2, 0.0) == []
    )


@pytest.mark.parametrize("equal", [True, False])
def test_shards_that_are_ranges_are_not_copied(equal: bool) -> None:
    lengths = np.full(64, 100) if equal else np.random.default_rng(0).integers(1, 200, 64)
    batch = Batch(lengths, {"tokens": np.arange(lengths.sum())}, {"group": np.arange(64) // 4})
    rows = batch.partition(4)
    parts = list(batch.split(rows))
    assert all(np.shares_memory(part["tokens"], batch["tokens"]) == equal for part in parts)
    for row, part in zip(rows, parts, strict=True):
        assert part["tokens"].tolist() == batch.take(row)["tokens"].tolist()
        assert part["group"].tolist() == batch["group"][row].tolist()
    np.testing.assert_array_equal(
        batch.join(rows, [part["tokens"] for part in parts]), batch["tokens"]
    )


def test_micro_batches_respect_the_limit() -> None:
    lengths = np.array([5, 5, 5, 3, 3, 3])
    groups = micro_batches(lengths, 8)
    assert all(lengths[g].sum() <= 8 for g in groups)
    assert len(micro_batches(lengths, 1000, at_least=4)) == 4
    with pytest.raises(ValueError, match="5 tokens exceeds max_tokens_per_gpu=4"):
        micro_batches(lengths, 4)


def test_loss_weights_are_what_their_names_say() -> None:
    batch = make((3, 1, 0, 4))  # 2, 0, 0 and 3 valid tokens
    mask = batch["loss_mask"]

    def of(aggregation: Aggregation, constant: int = 1) -> list[float]:
        weight = loss_weight(batch, aggregation, constant)
        assert weight.dtype == np.float32
        assert not weight[~mask].any()
        return weight[mask].tolist()

    assert of(Aggregation.TOKEN_MEAN) == pytest.approx([1 / 5] * 5)
    assert of(Aggregation.SEQUENCE_MEAN_TOKEN_MEAN) == pytest.approx([1 / 4] * 2 + [1 / 6] * 3)
    assert of(Aggregation.SEQUENCE_MEAN_TOKEN_SUM) == pytest.approx([1 / 2] * 5)
    assert of(Aggregation.CONSTANT, 10) == pytest.approx([1 / 20] * 5)


def test_nothing_valid_weighs_nothing() -> None:
    batch = make((2, 1))
    batch = batch.with_tokens(loss_mask=np.zeros(3, bool))
    for aggregation in Aggregation:
        assert loss_weight(batch, aggregation).tolist() == [0, 0, 0]


def test_prepare_clears_what_is_under_the_mask() -> None:
    batch = make((3,)).with_tokens(advantages=np.array([np.nan, 1, np.inf], np.float32))
    batch = batch.with_tokens(loss_mask=np.array([False, True, False]))
    assert prepare(batch, ToyAlgorithm(ToyAlgorithmConfig()))["advantages"].tolist() == [0, 1, 0]


def test_metrics_merge_as_sums() -> None:
    parts = [
        {"m": Metric(3, 1), "max": Metric(1, how="max")},
        {"m": Metric(1, 3), "max": Metric(2, how="max")},
    ]
    assert values(merge(parts)) == {"m": 1.0, "max": 2.0}
    with pytest.raises(ValueError, match="cannot merge"):
        Metric(1) | Metric(1, how="sum")


def test_masks_are_derived_from_origins() -> None:
    trajectory = Trajectory(
        (
            Segment((1, 2), Origin.PROMPT),
            Segment((3, 4), Origin.SAMPLED, (-0.5, -0.25), (7, 8)),
            Segment((5,), Origin.OBSERVATION),
            Segment((6,), Origin.TARGET),
        )
    )
    columns = columns_of([trajectory])
    assert columns["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    assert columns["loss_mask"].tolist() == [False, False, True, True, False, True]
    assert columns["rollout_logprobs"].tolist() == [0, 0, -0.5, -0.25, 0, 0]
    assert columns["version"].tolist() == [-1, -1, 7, 8, -1, -1]
    with pytest.raises(ValueError, match="needs 1 log-probs"):
        Segment((3,), Origin.SAMPLED)


def test_streams_are_named() -> None:
    assert derive(0, "a", 1) == derive(0, "a", 1) != derive(0, "a", 2)
    assert stream(0, "x").random() != stream(0, "y").random()


@pytest.mark.parametrize("longest", [5, 300])
def test_split_is_take_and_join_undoes_it(longest: int) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(longest // 2, longest, 17)
    column = random.random(int(lengths.sum()), np.float32)
    batch = Batch(lengths, {"x": column, "ids": np.arange(len(column))}, {"r": np.arange(17)})
    rows = [np.array([3, 1, 16]), np.array([], np.int64), np.setdiff1d(np.arange(17), [3, 1, 16])]
    parts = list(batch.split(rows))
    for part, index in zip(parts, rows, strict=True):
        taken = batch.take(index)
        assert (part.lengths == taken.lengths).all() and (part["r"] == index).all()
        assert (part["x"] == taken["x"]).all() and (part["ids"] == taken["ids"]).all()
    assert (batch.join(rows, [part["x"] for part in parts]) == column).all()
