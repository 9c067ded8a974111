"""Define the options of engines that train with AdamW, once for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Self

from coupler.engine_kit import schedules
from coupler.interfaces import EngineConfig


class Schedule(StrEnum):
    """The shape of the learning rate over the run.

    :mod:`coupler.engine_kit.schedules` has the formulas.
    """

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
    """Options of AdamW (arXiv 1711.05101), clipping and the learning rate, which an
    engine's configuration extends.
    """

    lr: float = 1e-6
    """The highest learning rate of the schedule."""
    beta1: float = 0.9
    """AdamW's decay of the running mean of gradients."""
    beta2: float = 0.999
    """AdamW's decay of the running mean of squared gradients."""
    eps: float = 1e-8
    """AdamW's epsilon, which is added to the denominator of an update."""
    weight_decay: float = 0.0
    """AdamW's weight decay; biases and norms never decay."""
    max_grad_norm: float = 1.0
    """Gradients whose norm is above this are scaled down to it; 0 never clips."""
    schedule: Schedule = Schedule.CONSTANT
    """The shape of the learning rate over the run."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises; the first one already has
    lr / warmup_steps."""
    warmup_ratio: float = 0.0
    """The warm-up as a share of the schedule's optimizer steps, at least one step; it
    stands instead of warmup_steps."""
    init_lr_ratio: float = 0.0
    """The share of lr from which the warm-up rises."""
    total_steps: int = 0
    """Optimizer steps after which the schedule has ended; 0 takes those of the whole
    run."""
    decay_steps: int = 0
    """Optimizer steps at the end of the run over which the wsd schedule decays."""
    min_lr_ratio: float = 0.0
    """The lowest learning rate after the warm-up, as a share of lr."""
    num_cycles: float = 0.5
    """Cycles of the cosine schedule: 0.5 falls to min_lr_ratio, 1 falls and rises
    again, 1.5 falls twice.
    """

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
        self._require(
            not (self.warmup_ratio and self.warmup_steps),
            "warmup_ratio",
            "needs engine.warmup_steps=0",
        )
        self._require(self.num_cycles > 0, "num_cycles", "must be above 0")
        self._check_schedule()

    def _check_schedule(self) -> None:
        for key, readers in READ_UNDER.items():
            in_vain = self.schedule not in readers and getattr(self, key) != getattr(
                AdamWConfig, key
            )
            self._require(not in_vain, key, f"needs engine.schedule={_either(readers)}")

        rises = self.warmup_steps > 0 or self.warmup_ratio > 0
        self._require(
            rises or not self.init_lr_ratio, "init_lr_ratio", "needs engine.warmup_steps above 0"
        )

        if self.total_steps:
            why = (
                f"must be at least {self._least} (warm-up and decay) under "
                f"engine.schedule={self.schedule}"
            )
            self._require(self.total_steps >= self._least, "total_steps", why)
        if self.schedule == Schedule.WSD:
            self._require(
                self.decay_steps > 0, "decay_steps", "must be above 0 under engine.schedule=wsd"
            )

    @property
    def _least(self) -> int:
        """The fewest optimizer steps that hold a whole schedule."""
        return self.warmup_steps + max(self.decay_steps, 1)

    @property
    def rate(self) -> str:
        """The schedule and its lengths."""
        over = f" over {self.total_steps} optimizer steps" if self.total_steps else ""
        return f"{self.schedule}{over}" + (
            f", warm-up over {self.warmup_steps}" if self.warmup_steps else ""
        )

    def for_run(self, num_steps: int) -> Self:
        """Let a schedule whose end is not set end with the run, and count the steps of
        a warm-up given as a share.

        An engine that takes no step, a policy while its critic warms up, gets the
        shortest schedule there is: its checkpoints hold an optimizer, and no step uses
        the rate.
        """
        counted = self._counted(self.total_steps or max(num_steps, 1))
        return counted._ending(num_steps or counted._least)

    def _counted(self, num_steps: int) -> Self:
        if not self.warmup_ratio:
            return self
        return replace(
            self, warmup_steps=max(1, int(self.warmup_ratio * num_steps)), warmup_ratio=0.0
        )

    def _ending(self, num_steps: int) -> Self:
        if self.schedule == Schedule.CONSTANT or self.total_steps:
            return self
        if num_steps < self._least:
            raise ValueError(
                f"engine.warmup_steps and engine.decay_steps take {self._least} optimizer steps "
                f"under engine.schedule={self.schedule}, and the run has {num_steps}.\n"
                "  try:  fewer of them, more steps, or engine.total_steps"
            )
        return replace(self, total_steps=num_steps)

    def _require(self, holds: bool, key: str, what: str) -> None:
        if not holds:
            raise ValueError(f"engine.{key} {what}, got {getattr(self, key)}.")


def multiplier(config: AdamWConfig) -> partial[float]:
    """Return the function from optimizer steps done to the share of ``lr`` that the
    next step has.

    Raises:
        ValueError: the schedule depends on the length of a run that ``config`` was not
            made for.
    """
    if config.warmup_ratio or (config.schedule != Schedule.CONSTANT and not config.total_steps):
        raise ValueError(
            f"engine.schedule={config.schedule} needs the length of the run: "
            "EngineConfig.for_run(steps)."
        )

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
