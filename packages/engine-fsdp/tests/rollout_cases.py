"""Small random models, and weight updates, for the tests of the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Olmo2Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from coupler.interfaces import Completion, Endpoint, Model, Rank, Request, WeightUpdate
from coupler_engine_fsdp.config import HFConfig
from coupler_engine_fsdp.rollout import HFRollout

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "olmo2": Olmo2Config}


def make_model(folder: Path, family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write ``config.json`` of a random model whose distributions are not flat; return
    the model itself.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    config = FAMILIES[family](**(sizes | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
    config.save_pretrained(folder)
    return model


def named_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def publish(version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
    """Send weights through the in-process transport; return what a rollout receives
    them with.
    """
    update = WeightUpdate(
        version,
        "full",
        "coupler.builtin.transports.inproc:InprocTransport",
        (Endpoint("inproc"),),
        1,
        5.0,
    )
    update.open().send(weights.items(), update, Rank())
    return update


async def start(
    folder: Path, model: PreTrainedModel | None, version: int = 0, **config: Any
) -> HFRollout:
    rollout = HFRollout(HFConfig(**config), Model(str(folder)))
    await rollout.setup(Rank(seed=5))
    if model is not None:
        await rollout.update(publish(version, named_weights(model)))
    return rollout


def full_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], done: Completion, temperature: float
) -> torch.Tensor:
    """[len(done.tokens)] of one forward over everything."""
    ids = torch.tensor([[*prompt, *done.tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logprobs.gather(1, torch.tensor(done.tokens)[:, None])[:, 0]


def random_prompt(length: int, seed: int, vocab: int = 97) -> tuple[int, ...]:
    return tuple(
        torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


def difference(model: PreTrainedModel, request: Request, done: Completion) -> float:
    expected = full_logprobs(model, request.prompt, done, request.temperature)
    return float((expected - torch.tensor(done.logprobs)).abs().max())
