"""Say how much device memory a backend will need, before anything is loaded.

The configuration of an engine or of a rollout may have the method of
:class:`PlansMemory`. ``coupler plan --memory`` asks it for every role of a run and adds
up what shares a device. A backend without the method is listed as unknown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from coupler.interfaces import Memory, Model, Part

GIB = 1 << 30
# Memory that offload and sleep move, or None for what they leave on the device.
Kind = Part | Memory | None


class Phase(StrEnum):
    """The phases of a step that need different memory."""

    SAMPLING = "sampling"
    LOGPROBS = "log-probs"
    TRAINING = "training"
    SYNC = "weight sync"
    SAVING = "saving"


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the memory of a device.

    Attributes:
        what: the part, such as "AdamW's moments (fp32)".
        size: bytes on the device that has the most.
        lower: the option that lowers it, with a value or a direction. Empty where none
            does.
        parked: whether the host keeps it while it is off the device. What is computed
            anew needs no host memory.
    """

    what: str
    size: int
    lower: str = ""
    parked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The facts that an estimate starts from.

    Attributes:
        path: the place of the asked configuration in the run's, such as
            ``critic.engine``.
        model: the role's model. Its folder has a ``config.json``, and may have no
            weights.
        shape: the content of ``config.json``.
        trains: whether the role takes optimizer steps.
        gpu: whether devices are GPUs, which decides what ``dtype=auto`` means.
        device_bytes: memory of one device, 0 where it is not known.
        longest: most tokens of a sequence, 0 where nothing bounds it.
        prompt: most tokens of a prompt.
        tokens: most tokens that one data shard has in an optimizer step, 0 where
            nothing bounds them.
        sequences: sequences that one replica samples in a step.
        parameters: numbers in the policy's weights, 0 where its engine does not say.
    """

    path: str
    model: Model
    shape: Mapping[str, Any]
    trains: bool = False
    gpu: bool = True
    device_bytes: int = 0
    longest: int = 0
    prompt: int = 0
    tokens: int = 0
    sequences: int = 0
    parameters: int = 0

    def micro_batch(self, limit: int) -> int:
        """Return the most tokens of a micro-batch whose option allows ``limit``."""
        return min(limit, self.tokens or limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The memory of one role on the device that holds most of it.

    Attributes:
        held: what stays between calls, by what can move it.
        peaks: what each phase needs on top, at the moment at which it needs most.
        unknown: sentences on what could not be estimated, and is in no number.
        parameters: numbers in the weights of the whole model.
        host: bytes that are in host memory always, besides what leaves the device, and
            that a step copies to the device and back.
    """

    held: Mapping[Kind, tuple[Term, ...]] = field(default_factory=dict)
    peaks: Mapping[Phase, tuple[Term, ...]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    parameters: int = 0
    host: int = 0


@runtime_checkable
class PlansMemory(Protocol):
    """A configuration whose backend says what memory it will need."""

    def memory_needs(self, asked: Asked) -> Needs:
        """Estimate the memory of one role.

        It reads no weights and takes no device, and may take some seconds.

        Raises:
            CouplerError: the model cannot be described.
        """
        ...


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The layers of a role that compute their activations again in the backward pass.

    Attributes:
        config: the role's configuration, with this number instead of ``auto``.
        needs: the memory that it then needs.
        layers: the number.
        every: all layers of one rank.
    """

    config: Any
    needs: Needs
    layers: int
    every: int


@runtime_checkable
class ChoosesRecompute(Protocol):
    """A configuration of an engine that may leave it to the plan how many layers
    compute their activations again.
    """

    @property
    def leaves_recompute(self) -> bool:
        """Tell whether it does."""
        ...

    def choose_recompute(self, asked: Asked, fits: Callable[[Needs], bool] | None) -> Recomputed:
        """Choose the fewest layers whose needs fit, or all layers where none do.

        Args:
            fits: judges the needs of a number of layers. None takes all layers.

        Raises:
            CouplerError: the model cannot be described.
        """
        ...


def fewest(every: int, fits: Callable[[int], bool]) -> int:
    """Return the fewest of ``every`` that fit, or ``every`` where none do.

    More must fit where fewer do. It asks about as many numbers as ``every`` has bits.
    """
    return bisect_left(range(every), True, key=fits)


def total(terms: Iterable[Term]) -> int:
    """Return the bytes of all terms."""
    return sum(term.size for term in terms)


def largest(*moments: tuple[Term, ...]) -> tuple[Term, ...]:
    """Return the moment that needs most."""
    return max(moments, key=total)
