"""Trajectory: what was fed to the model and what it sampled, as token ids with an origin. Masks are derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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

    def columns(self) -> dict[str, np.ndarray]:
        """The token columns this trajectory determines: tokens, loss_mask, rollout_logprobs, version, each [T]."""
        tokens = np.fromiter((i for s in self.segments for i in s.ids), np.int32, len(self))
        loss_mask = np.zeros(len(self), bool)
        logprobs = np.zeros(len(self), np.float32)
        version = np.full(len(self), -1, np.int32)
        start = 0
        for segment in self.segments:
            stop = start + len(segment.ids)
            loss_mask[start:stop] = segment.origin in (Origin.SAMPLED, Origin.TARGET)
            if segment.origin is Origin.SAMPLED:
                logprobs[start:stop] = segment.logprobs
                version[start:stop] = segment.versions
            start = stop
        return {"tokens": tokens, "loss_mask": loss_mask, "rollout_logprobs": logprobs, "version": version}
