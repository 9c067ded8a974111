from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from coupler.engine_kit.adamw import AdamWConfig, Schedule, multiplier
from coupler.engine_kit.schedules import constant, cosine, linear, wsd

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


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        (constant, {}),
        (linear, {"total": 100}),
        (cosine, {"total": 100}),
        (wsd, {"total": 100, "decay": 20}),
    ],
)
def test_warmup_starts_at_a_share_of_the_rate(
    shape: Callable[..., float], settings: dict[str, int]
) -> None:
    rates = [shape(step, warmup=4, init=0.2, **settings) for step in range(5)]
    assert rates == pytest.approx([0.4, 0.6, 0.8, 1, 1])


def test_a_cosine_of_several_cycles() -> None:
    def rates(cycles: float) -> list[float]:
        return [
            cosine(step, total=110, warmup=10, floor=0.2, cycles=cycles)
            for step in (10, 35, 60, 85, 110, 999)
        ]

    assert rates(0.5) == pytest.approx(
        [1, 0.6 + 0.4 * math.cos(math.pi / 4), 0.6, 0.6 - 0.4 * 0.5**0.5, 0.2, 0.2]
    )
    assert rates(1) == pytest.approx([1, 0.6, 0.2, 0.6, 1, 1])
    assert rates(2) == pytest.approx([1, 0.2, 1, 0.2, 1, 1])


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


LENGTH = {"total_steps": 100}
WHOLE = AdamWConfig(schedule=Schedule.COSINE, warmup_steps=10, **LENGTH)
# of every option of the rate, another value than that of the configuration beside it
OTHERS = {
    "schedule": (WHOLE, Schedule.LINEAR),
    "warmup_steps": (WHOLE, 20),
    "warmup_ratio": (replace(WHOLE, warmup_steps=0), 0.2),
    "init_lr_ratio": (WHOLE, 0.5),
    "total_steps": (WHOLE, 200),
    "min_lr_ratio": (WHOLE, 0.1),
    "num_cycles": (WHOLE, 1.5),
    "decay_steps": (replace(WHOLE, schedule=Schedule.WSD, decay_steps=10), 20),
}


def test_every_option_of_the_rate_changes_it() -> None:
    beside = {
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "max_grad_norm",
        "name",
        "ranks",
        "python",
    }
    assert {f.name for f in fields(AdamWConfig)} - beside == OTHERS.keys()
    for key, (config, value) in OTHERS.items():
        plain, other = multiplier(config), multiplier(replace(config, **{key: value}).for_run(100))
        assert any(plain(step) != other(step) for step in range(100)), key


@pytest.mark.parametrize(
    ("schedule", "key", "value", "needs"),
    [
        ("constant", "total_steps", 10, "engine.schedule=linear, cosine or wsd"),
        ("constant", "min_lr_ratio", 0.1, "engine.schedule=linear, cosine or wsd"),
        ("linear", "num_cycles", 1.0, "engine.schedule=cosine"),
        ("wsd", "num_cycles", 1.0, "engine.schedule=cosine"),
        ("cosine", "decay_steps", 3, "engine.schedule=wsd"),
        ("cosine", "init_lr_ratio", 0.3, "engine.warmup_steps above 0"),
        ("wsd", "warmup_ratio", 0.1, "engine.warmup_steps=0"),
    ],
)
def test_an_option_that_the_schedule_does_not_read_is_refused(
    schedule: str, key: str, value: float, needs: str
) -> None:
    settings = {
        "schedule": Schedule(schedule),
        **({} if schedule == "constant" else {"total_steps": 9}),
    }
    settings |= {"decay_steps": 2, "warmup_steps": 3} if schedule == "wsd" else {}
    AdamWConfig(**settings)
    with pytest.raises(ValueError, match=re.escape(f"engine.{key} needs {needs}, got {value}.")):
        AdamWConfig(**{**settings, key: value})


def test_a_schedule_without_a_length_takes_the_run_s() -> None:
    config = replace(WHOLE, total_steps=0)
    assert config.for_run(50).total_steps == 50
    assert WHOLE.for_run(50).total_steps == 100
    assert AdamWConfig().for_run(50) == AdamWConfig()


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": Schedule.COSINE},
        {"schedule": Schedule.LINEAR, "warmup_steps": 5},
        {"schedule": Schedule.WSD, "decay_steps": 3, "warmup_ratio": 0.1},
        {"warmup_ratio": 0.1},
        {"schedule": Schedule.COSINE, "total_steps": 100},
    ],
)
def test_an_engine_that_takes_no_step_has_a_schedule_too(settings: dict[str, Any]) -> None:
    """A policy whose run is the critic's warm-up: its checkpoint holds an optimizer,
    whose rate nothing uses.
    """
    assert 0 < multiplier(AdamWConfig(**settings).for_run(0))(0) <= 1


def test_a_warm_up_is_a_share_of_the_schedule() -> None:
    for settings, steps in (
        ({}, 5),
        ({"schedule": Schedule.LINEAR}, 5),
        ({"schedule": WHOLE.schedule, **LENGTH}, 10),
    ):
        config = AdamWConfig(**settings, warmup_ratio=0.1, init_lr_ratio=0.5).for_run(50)
        assert (config.warmup_steps, config.warmup_ratio) == (steps, 0.0)
        assert multiplier(config)(0) == pytest.approx(0.5 + 0.5 / steps)
    assert AdamWConfig(warmup_ratio=0.1, init_lr_ratio=0.5).for_run(3).warmup_steps == 1


@pytest.mark.parametrize("settings", [{"warmup_ratio": 0.1}, {"schedule": Schedule.COSINE}])
def test_a_schedule_that_was_not_told_the_length_is_an_error(settings: dict[str, Any]) -> None:
    """A cosine of no steps would have ended before the first one."""
    with pytest.raises(ValueError, match="needs the length of the run"):
        multiplier(AdamWConfig(**settings))


@pytest.mark.parametrize(
    ("key", "value"),
    [("warmup_ratio", 1.0), ("init_lr_ratio", 1.1), ("init_lr_ratio", -0.1), ("num_cycles", 0.0)],
)
def test_a_value_out_of_range_is_named(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"engine\.{key} must be"):
        replace(WHOLE, **{key: value})
