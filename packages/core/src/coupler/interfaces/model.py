"""Define the model of a role, and the place of one worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The place of one worker: ``index`` of ``world``, on ``node``, with its devices.

    Attributes:
        rendezvous: ``"host:port"`` that core chose for this group, empty for a world
            of 1.
        devices: UUIDs. Empty means the CPU, or every device that the process sees.
        seed: already derived for this role and rank.
        deterministic: whether equal inputs must give equal bits, at any cost.
    """

    index: int = 0
    world: int = 1
    rendezvous: str = ""
    node: str = ""
    devices: tuple[str, ...] = ()
    seed: int = 0
    deterministic: bool = False


class Head(StrEnum):
    """The last layer of a model, above its backbone."""

    # predicts the next token
    LM = "lm"
    # one number per token, by score.weight [1, H] and score.bias [1] of
    # AutoModelForTokenClassification
    VALUE = "value"
    # the same without a bias, by score.weight [1, H] alone of
    # AutoModelForSequenceClassification with one label
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class Model:
    """The model of one role: a folder in Hugging Face layout (config, safetensors,
    tokenizer).

    With another head than LM, a language-model head in the folder is left out. If the
    folder has no ``score``, it is zeros, so that every value is 0 until the first step
    for any seed and number of ranks.

    With ``own_weights``, a rollout of capability ``model:own_weights`` serves the
    weights of the folder from its setup on, and no update comes.

    With ``frozen``, an engine computes outputs and is never trained: a reference, or a
    reward model. It may hold weights in the dtype that it computes with.
    """

    path: str
    trust_remote_code: bool = False
    head: Head = Head.LM
    own_weights: bool = False
    frozen: bool = False
