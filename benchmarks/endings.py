"""Random weights whose completions end by chance: lengths as ragged as those of a
trained model, without one.

    python benchmarks/endings.py                 # samples, and prints the mean length
    python benchmarks/endings.py --shape 135m --mean 32 --samples 16

An untrained model ends a completion at one of as many tokens as it has ids. With
:func:`end_by_chance` it ends each with about the same probability at every token,
whatever the text is. Lengths are geometric then: of 256 completions the longest has
about six times the mean, and half of the time until it ends fewer than one in twenty
are left.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from shapes import SHAPES
from torch import Tensor, nn

UNUSED = -30.0  # logit of ids that are not sampled
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def end_by_chance(model: Any, mean: float, eos: int, tokens: Sequence[int]) -> float:
    """Let completions of a Qwen2 with random weights have ``mean`` tokens on average.

    Dimension 0 of the residual stream becomes a constant that no layer reads or
    writes. Only the head reads it: for the end, and for ids that are not sampled. The
    logits of ``tokens`` get a standard deviation of 1.

    Args:
        model: a ``Qwen2ForCausalLM`` in fp32, whose head is not tied to its embedding.
        mean: tokens of a completion, its end included, where nothing cuts it off.
        eos: the id that ends a completion.
        tokens: other ids that are sampled, at temperature 1.

    Returns:
        The mean entropy of a token, in nats.

    Raises:
        ValueError: the head is tied.
    """
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    if head.data_ptr() == embedding.data_ptr():
        raise ValueError("the head is tied to the embedding: set tie_word_embeddings=False")

    embedding.normal_()
    embedding[:, 0] = math.sqrt(embedding.shape[1])
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
        layer.input_layernorm.weight[0] = 0
        layer.post_attention_layernorm.weight[0] = 0

    sampled = torch.tensor(tokens, device=head.device)
    text = sampled[torch.randint(len(tokens), (8, 128), device=head.device)]
    hidden = model.model(text).last_hidden_state.flatten(0, 1)
    constant = hidden[:, 0].mean()

    head[:, 0] = 0
    head[sampled] /= (hidden @ head[sampled].T).std()
    ids = torch.arange(len(head), device=head.device)
    head[~torch.isin(ids, sampled), 0] = UNUSED / constant
    head[eos] = 0
    logits = hidden @ head[sampled].T
    head[eos, 0] = _logit(logits.logsumexp(-1), hidden[:, 0] / constant, 1 / mean) / constant
    model.generation_config.eos_token_id = model.config.eos_token_id = eos

    logprobs = torch.cat([logits, hidden @ head[eos, :, None]], -1).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1).mean().item()


def _logit(others: Tensor, scale: Tensor, probability: float) -> float:
    """Return the logit of the end that has ``probability`` in the mean.

    Args:
        others: [n] logsumexp of the other logits.
        scale: [n] what the logit is multiplied with.
    """
    low, high = -50.0, 50.0
    for _ in range(50):
        middle = (low + high) / 2
        ends = torch.sigmoid(middle * scale - others).mean().item()
        low, high = (low, middle) if ends > probability else (middle, high)
    return low


def lengths(model: nn.Module, prompts: Tensor, limit: int, eos: int) -> list[int]:
    """Sample a completion of each of ``prompts``, [n, length], and return how many
    tokens each has, its end included.
    """
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=limit,
        eos_token_id=eos,
        pad_token_id=eos,
    )[:, prompts.shape[1] :]
    ended = (out == eos).int().cumsum(-1) > 0
    return [min(int(number) + 1, out.shape[1]) for number in (~ended).sum(-1)]


def main() -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--mean", type=float, default=64)
    parser.add_argument("--samples", type=int, default=256)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = Qwen2Config(**{**SHAPES[arguments.shape], "tie_word_embeddings": False})
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    tokens, eos = range(2, 34), 1
    entropy = end_by_chance(model, arguments.mean, eos, tokens)
    prompts = torch.randint(2, 34, (arguments.samples, 96), device=DEVICE)
    found = sorted(lengths(model, prompts, int(10 * arguments.mean), eos))
    print(
        f"RESULT {arguments.shape}: {statistics.mean(found):.1f} tokens in the mean, asked for "
        f"{arguments.mean:.1f}; median {statistics.median(found):.0f}, nine tenths below "
        f"{found[9 * len(found) // 10]}, longest {found[-1]}; entropy {entropy:.2f} nats"
    )


if __name__ == "__main__":
    main()
