"""Build the critic: a causal LM's backbone under a head of one number per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coupler_engine_fsdp.packing import Packed

SCORE = ("score.weight", "score.bias")
"""The head's names in a checkpoint, as AutoModelForTokenClassification has them."""


class ValueHead(nn.Linear):
    """Map [R, H] hidden states to [R] values, always in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        # The output may be no view, since FSDP hooks it.
        values = torch.mv(input.float(), self.weight.float()[0])
        return values if self.bias is None else values + self.bias.float()


class ValueModel(nn.Module):
    """The module of a critic or a reward model that FSDP wraps.

    It is one forward from tokens to values.
    """

    def __init__(self, causal: PreTrainedModel, *, bias: bool) -> None:
        super().__init__()
        self.causal: Any = causal
        old = causal.get_output_embeddings()
        self.dropped = next(name for name, module in causal.named_modules() if module is old)
        parent, _, name = self.dropped.rpartition(".")
        delattr(causal.get_submodule(parent), name)
        width = causal.config.get_text_config().hidden_size
        self.causal.score = ValueHead(width, 1, bias=bias, device="meta", dtype=torch.float32)

    @property
    def head(self) -> ValueHead:
        return self.causal.score

    def forward(
        self, packed: Packed, want: frozenset[str] = frozenset(), states: bool = False
    ) -> Any:
        """Return the values [R] of the predicted rows, by name.

        With ``states``, which checks use, it returns all hidden states [N, H].
        """
        hidden = self.causal.base_model(
            input_ids=packed.tokens,
            position_ids=packed.positions,
            use_cache=False,
            packing=packed.packing,
        ).last_hidden_state[0]
        return hidden if states else {"values": self.head(hidden[packed.sources])}

    def names(self, files: Mapping[str, Any]) -> list[str]:
        """Return the names of its tensors, given those of a checkpoint.

        They are without the language-model head, and with the score.
        """
        kept = [name for name in files if not name.startswith((f"{self.dropped}.", *SCORE))]
        return [*kept, *SCORE[: 1 if self.head.bias is None else 2]]


@torch.no_grad()
def zero_absent(named: Mapping[str, Tensor], files: Mapping[str, Any]) -> None:
    """Start the part of the score that no checkpoint holds at zero.

    It is then equal on any number of ranks.
    """
    for name in SCORE:
        if name in named and name not in files:
            named[name].zero_()
