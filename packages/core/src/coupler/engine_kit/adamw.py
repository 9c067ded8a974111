"""Declare the options of every engine that trains with AdamW: one set of keys, one meaning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Self

from coupler.engine_kit import schedules
from coupler.interfaces import EngineConfig


class Schedule(StrEnum):
    """Shape of the learning rate over the run: see :mod:`coupler.engine_kit.schedules`."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"


READ_UNDER = {  # options that not every schedule reads
    "total_steps": (Schedule.LINEAR, Schedule.COSINE, Schedule.WSD),
    "min_lr_ratio": (Schedule.LINEAR, Schedule.COSINE, Schedule.WSD),
    "num_cycles": (Schedule.COSINE,),
    "decay_steps": (Schedule.WSD,),
}


@dataclass
class AdamWConfig(EngineConfig):
    """AdamW (arXiv 1711.05101), clipping and the learning rate; an engine's configuration extends it."""

    lr: float = 1e-6
    """The highest learning rate of the schedule."""
    beta1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: float = 0.999
    """AdamW's decay of the mean of squared gradients."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the root of the mean of squared gradients."""
    weight_decay: float = 0.0
    """AdamW's weight decay; biases and norms have none."""
    max_grad_norm: float = 1.0
    """The gradient is clipped to this global norm; 0 does not clip."""
    schedule: Schedule = Schedule.CONSTANT
    """The shape of the learning rate over the run."""
    warmup_steps: int = 0
    """The learning rate rises over this many optimizer steps; the first one already has lr
    / warmup_steps."""
    warmup_ratio: float = 0.0
    """The learning rate rises over this share of all optimizer steps of the schedule, over
    one at least."""
    init_lr_ratio: float = 0.0
    """The warm-up rises from this share of lr."""
    total_steps: int = 0
    """The schedule has ended after this many optimizer steps; 0 is those of the whole run.
    """
    decay_steps: int = 0
    """The wsd schedule decays over this many optimizer steps at its end."""
    min_lr_ratio: float = 0.0
    """The learning rate falls to this share of lr after the warm-up."""
    num_cycles: float = 0.5
    """Cycles of the cosine schedule: 0.5 falls to min_lr_ratio, 1 falls and rises again,
    1.5 falls twice."""

    def __post_init__(self) -> None:
        """Check the keys of this class.

        Raises:
            ValueError: one is out of range, or does not fit another; names the key.
        """
        for key in ("lr", "eps"):
            self._require(getattr(self, key) > 0, key, "must be above 0")
        for key in ("weight_decay", "max_grad_norm", "warmup_steps", "total_steps", "decay_steps"):
            self._require(getattr(self, key) >= 0, key, "must not be negative")
        for key in ("beta1", "beta2"):
            self._require(0 <= getattr(self, key) < 1, key, "must be in [0, 1)")
        for key in ("init_lr_ratio", "min_lr_ratio"):
            self._require(0 <= getattr(self, key) <= 1, key, "must be in [0, 1]")
        self._require(0 <= self.warmup_ratio < 1, "warmup_ratio", "must be in [0, 1)")
        self._require(not (self.warmup_ratio and self.warmup_steps), "warmup_ratio", "needs engine.warmup_steps=0")
        self._require(self.num_cycles > 0, "num_cycles", "must be above 0")
        self._check_schedule()

    def _check_schedule(self) -> None:
        for key, readers in READ_UNDER.items():
            in_vain = self.schedule not in readers and getattr(self, key) != getattr(AdamWConfig, key)
            self._require(not in_vain, key, f"needs engine.schedule={_either(readers)}")
        rises = self.warmup_steps > 0 or self.warmup_ratio > 0
        self._require(rises or not self.init_lr_ratio, "init_lr_ratio", "needs engine.warmup_steps above 0")
        if self.total_steps:
            why = f"must be at least {self._least} (warm-up and decay) under engine.schedule={self.schedule}"
            self._require(self.total_steps >= self._least, "total_steps", why)
        if self.schedule == Schedule.WSD:
            self._require(self.decay_steps > 0, "decay_steps", "must be above 0 under engine.schedule=wsd")

    @property
    def _least(self) -> int:
        """The fewest optimizer steps that a schedule which ends fits into."""
        return self.warmup_steps + max(self.decay_steps, 1)

    @property
    def rate(self) -> str:
        """The schedule and its lengths."""
        over = f" over {self.total_steps} optimizer steps" if self.total_steps else ""
        return f"{self.schedule}{over}" + (f", warm-up over {self.warmup_steps}" if self.warmup_steps else "")

    def for_run(self, num_steps: int) -> Self:
        """Let a schedule whose end is not set end with the run, and count the steps of a warm-up given as a share."""
        if not num_steps:
            return self
        return self._counted(self.total_steps or num_steps)._ending(num_steps)

    def _counted(self, num_steps: int) -> Self:
        if not self.warmup_ratio:
            return self
        return replace(self, warmup_steps=max(1, int(self.warmup_ratio * num_steps)), warmup_ratio=0.0)

    def _ending(self, num_steps: int) -> Self:
        if self.schedule == Schedule.CONSTANT or self.total_steps:
            return self
        if num_steps < self._least:
            raise ValueError(
                f"engine.warmup_steps and engine.decay_steps take {self._least} optimizer steps under "
                f"engine.schedule={self.schedule}, and the run has {num_steps}.\n"
                "  try:  fewer of them, more steps, or engine.total_steps"
            )
        return replace(self, total_steps=num_steps)

    def _require(self, holds: bool, key: str, what: str) -> None:
        if not holds:
            raise ValueError(f"engine.{key} {what}, got {getattr(self, key)}.")


def multiplier(config: AdamWConfig) -> partial[float]:
    """The function from optimizer steps done to the share of ``lr`` that the next one has.

    Raises:
        ValueError: the schedule depends on the length of a run that ``config`` was not made for.
    """
    if config.warmup_ratio or (config.schedule != Schedule.CONSTANT and not config.total_steps):
        raise ValueError(f"engine.schedule={config.schedule} needs the length of the run: EngineConfig.for_run(steps).")
    rise = {"warmup": config.warmup_steps, "init": config.init_lr_ratio}
    if config.schedule == Schedule.CONSTANT:
        return partial(schedules.constant, **rise)
    both = {**rise, "total": config.total_steps, "floor": config.min_lr_ratio}
    match config.schedule:
        case Schedule.LINEAR:
            return partial(schedules.linear, **both)
        case Schedule.COSINE:
            return partial(schedules.cosine, **both, cycles=config.num_cycles)
        case Schedule.WSD:
            return partial(schedules.wsd, **both, decay=config.decay_steps)


def _either(schedules: tuple[Schedule, ...]) -> str:
    *first, last = schedules
    return f"{', '.join(first)} or {last}" if first else last
