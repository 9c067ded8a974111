from __future__ import annotations

import math

import pytest

from coupler.schedules import constant, cosine, linear, wsd

SHAPES = {
    "constant": lambda step, warmup: constant(step, warmup=warmup),
    "linear": lambda step, warmup: linear(step, total=100, warmup=warmup),
    "cosine": lambda step, warmup: cosine(step, total=100, warmup=warmup),
    "wsd": lambda step, warmup: wsd(step, total=100, decay=20, warmup=warmup),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_no_step_of_a_run_has_rate_zero_and_none_exceeds_one(shape: str, warmup: int) -> None:
    rates = [SHAPES[shape](step, warmup) for step in range(100)]
    assert min(rates) > 0 and max(rates) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_warmup_rises_in_equal_steps(shape: str) -> None:
    assert [SHAPES[shape](step, 4) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_values_at_known_points() -> None:
    assert linear(60, total=110, warmup=10) == 0.5
    assert linear(60, total=110, warmup=10, floor=0.2) == pytest.approx(0.6)
    assert cosine(60, total=110, warmup=10) == pytest.approx(0.5)
    assert cosine(35, total=110, warmup=10) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert [wsd(step, total=100, decay=20) for step in (0, 80, 90)] == [1, 1, 0.5]


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_floor_holds_from_the_end_on(floor: float) -> None:
    for step in (100, 1000):
        assert linear(step, total=100, warmup=10, floor=floor) == pytest.approx(floor)
        assert cosine(step, total=100, warmup=10, floor=floor) == pytest.approx(floor)
        assert wsd(step, total=100, decay=20, floor=floor) == pytest.approx(floor)


def test_a_run_that_is_all_warmup_never_divides_by_zero() -> None:
    assert linear(3, total=4, warmup=4) == 1
