"""The model of a role, and where one worker stands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Where one worker stands: ``index`` of ``world``, on ``node``, with these devices."""

    index: int = 0
    world: int = 1
    rendezvous: str = ""  # "host:port" chosen by core for this group; empty where world == 1
    node: str = ""
    devices: tuple[str, ...] = ()  # UUIDs; empty: the CPU, or whatever the process sees
    seed: int = 0  # already derived for this role and rank
    deterministic: bool = False  # equal inputs must give equal bits, whatever it costs


class Head(StrEnum):
    """What stands on a model's backbone."""

    LM = "lm"  # predicts the next token
    VALUE = (
        "value"  # one number per token, by score.weight [1, H] and score.bias [1] of AutoModelForTokenClassification
    )


@dataclass(frozen=True, slots=True)
class Model:
    """The model of one role: a folder in Hugging Face layout (config, safetensors, tokenizer).

    With ``head=VALUE``, a language-model head in the folder is left out, and a ``score`` that is not there is zeros:
    every value is 0 until the first step, whatever the seed or the number of ranks.
    """

    path: str
    trust_remote_code: bool = False
    head: Head = Head.LM
