"""What is left of a distribution, and tokens that are sampled from it by a seed."""

from __future__ import annotations

import pytest
import torch

from coupler_rollout_sglang.worker.distribution import kept, mixed, sample, sample_on_cpu

ALL = 1 << 30
PROBS = torch.tensor([0.4, 0.05, 0.3, 0.2, 0.05])


@pytest.mark.parametrize(
    ("top_p", "left"),
    [
        (1e-6, {0}),
        (0.4, {0}),
        (0.41, {0, 2}),
        (0.7, {0, 2}),
        (0.71, {0, 2, 3}),
        (1.0, set(range(5))),
    ],
)
def test_the_fewest_tokens_stay_and_add_up_to_one(top_p: float, left: set[int]) -> None:
    rows, ids = kept(PROBS.log()[None], torch.tensor([ALL]), torch.tensor([top_p]))
    found = rows.exp()[0]
    assert set(ids[0].tolist()) - {-1} == left
    assert {i for i, p in enumerate(found.tolist()) if p > 0} == left
    assert found.sum() == pytest.approx(1.0)
    inside = PROBS[sorted(left)]
    assert found[sorted(left)].tolist() == pytest.approx((inside / inside.sum()).tolist())


def test_rows_are_cut_apart() -> None:
    top_ks, top_ps = torch.tensor([ALL, ALL, 2, 3]), torch.tensor([0.1, 1.0, 1.0, 0.6])
    rows, ids = kept(PROBS.log().repeat(4, 1), top_ks, top_ps)
    found = rows.exp().tolist()
    assert found[0] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert found[1] == PROBS.log().exp().tolist()
    assert found[2] == pytest.approx([4 / 7, 0, 3 / 7, 0, 0])
    # 0.4 and 0.3 are more than 0.6 of the 0.9 that three tokens have.
    assert found[3] == pytest.approx([4 / 7, 0, 3 / 7, 0, 0])
    assert ids[2].tolist() == ids[3].tolist() == [0, 2, -1, -1, -1]


@pytest.mark.parametrize("seeded", [True, False])
def test_samples_follow_the_distribution(seeded: bool) -> None:
    count = 20_000
    rows = PROBS.log().repeat(count, 1)
    torch.manual_seed(0)
    if seeded:
        found = sample_on_cpu(rows, torch.arange(count), torch.full((count,), 7))
    else:
        found = sample(rows)
    shares = torch.bincount(found, minlength=5) / count
    assert (shares - PROBS).abs().max() < 4.5 * 0.5 / count**0.5


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = torch.randn(8, 100).log_softmax(-1)
    seeds, positions = torch.arange(8), torch.arange(8) + 3
    together = sample_on_cpu(rows, seeds, positions)
    alone = [
        sample_on_cpu(rows[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(8)
    ]
    assert together.tolist() == torch.cat(alone).tolist()


def test_every_bit_of_a_seed_and_a_position_counts() -> None:
    seeds = [0, *(1 << bit for bit in range(63))]
    assert len({mixed(seed, 5) for seed in seeds}) == len(seeds)
    assert len({mixed(3, position) for position in range(1000)}) == 1000
