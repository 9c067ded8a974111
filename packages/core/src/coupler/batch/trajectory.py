"""Trajectory: what was fed to the model and what it sampled, as token ids with an origin. Masks are derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import numpy as np


class Origin(StrEnum):
    PROMPT = "prompt"  # rendered from the data
    SAMPLED = "sampled"  # drawn by the policy: trained on
    TARGET = "target"  # given by the data to imitate: trained on
    OBSERVATION = "observation"  # came back from a tool or an environment
    GLUE = "glue"  # separators that the chat template needs and nobody sampled


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one origin. Sampled segments carry one log-prob and one weights version per token."""

    ids: tuple[int, ...]
    origin: Origin
    logprobs: tuple[float, ...] = ()  # natural log, of the sampling distribution
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expected = len(self.ids) if self.origin is Origin.SAMPLED else 0
        if len(self.logprobs) != expected or len(self.versions) != expected:
            raise ValueError(
                f"a {self.origin} segment of {len(self.ids)} tokens needs {expected} log-probs and versions, "
                f"got {len(self.logprobs)} and {len(self.versions)}"
            )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Segments in order. Sampled ids are immutable: text is only ever parsed out of them, never put back."""

    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return sum(len(s.ids) for s in self.segments)

    @property
    def sampled(self) -> tuple[int, ...]:
        return tuple(i for s in self.segments if s.origin is Origin.SAMPLED for i in s.ids)


TRAINED = (Origin.SAMPLED, Origin.TARGET)


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """The token columns that trajectories determine: tokens, loss_mask, rollout_logprobs, version, each [T].

    T counts all their tokens, one trajectory after the other.
    """
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    sizes = np.array([len(segment.ids) for segment in segments], np.int64)
    total = int(sizes.sum())
    sampled = np.repeat(np.array([segment.origin is Origin.SAMPLED for segment in segments], bool), sizes)
    logprobs, version = np.zeros(total, np.float32), np.full(total, -1, np.int32)
    logprobs[sampled] = list(chain.from_iterable(segment.logprobs for segment in segments))  # others have none
    version[sampled] = list(chain.from_iterable(segment.versions for segment in segments))
    return {
        "tokens": np.fromiter(chain.from_iterable(segment.ids for segment in segments), np.int32, total),
        "loss_mask": np.repeat(np.array([segment.origin in TRAINED for segment in segments], bool), sizes),
        "rollout_logprobs": logprobs,
        "version": version,
    }
