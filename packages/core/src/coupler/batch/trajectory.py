"""Record the token ids that a model was fed and sampled, each with its origin.

Masks are derived from the origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import numpy as np


class Origin(StrEnum):
    """The source of a token."""

    # rendered from the data
    PROMPT = "prompt"
    # drawn by the policy, and trained on
    SAMPLED = "sampled"
    # given by the data to imitate, and trained on
    TARGET = "target"
    # returned by a tool or an environment
    OBSERVATION = "observation"
    # separators of the chat template, which nobody sampled
    GLUE = "glue"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one origin.

    Attributes:
        logprobs: one per token of a sampled segment, the natural log under the
            sampling distribution.
        versions: one weights version per token of a sampled segment.
    """

    ids: tuple[int, ...]
    origin: Origin
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expected = len(self.ids) if self.origin is Origin.SAMPLED else 0
        if len(self.logprobs) != expected or len(self.versions) != expected:
            raise ValueError(
                f"a {self.origin} segment of {len(self.ids)} tokens needs {expected} "
                f"log-probs and versions, got {len(self.logprobs)} and {len(self.versions)}"
            )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Segments in order.

    Sampled ids are immutable. Text is parsed out of them and never put back.
    """

    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return sum(len(s.ids) for s in self.segments)

    @property
    def sampled(self) -> tuple[int, ...]:
        """Return the sampled ids of all segments."""
        return tuple(i for s in self.segments if s.origin is Origin.SAMPLED for i in s.ids)


TRAINED = (Origin.SAMPLED, Origin.TARGET)


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Return tokens, loss_mask, rollout_logprobs and version of trajectories, each [T].

    T counts the tokens of all trajectories, one after the other.
    """
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    sizes = np.array([len(segment.ids) for segment in segments], np.int64)
    total = int(sizes.sum())
    ids = chain.from_iterable(segment.ids for segment in segments)
    trained = np.array([segment.origin in TRAINED for segment in segments], bool)

    # only sampled segments have log-probs and versions
    is_sampled = np.array([segment.origin is Origin.SAMPLED for segment in segments], bool)
    sampled = np.repeat(is_sampled, sizes)
    logprobs, version = np.zeros(total, np.float32), np.full(total, -1, np.int32)
    logprobs[sampled] = list(chain.from_iterable(segment.logprobs for segment in segments))
    version[sampled] = list(chain.from_iterable(segment.versions for segment in segments))

    return {
        "tokens": np.fromiter(ids, np.int32, total),
        "loss_mask": np.repeat(trained, sizes),
        "rollout_logprobs": logprobs,
        "version": version,
    }
