"""Tiny model folders, a plain transformers reference, and batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
)

from coupler.batch import Batch
from coupler.interfaces import Columns, Model, Named, Output, Rank, StepInfo
from coupler.metrics import Metric, Metrics
from coupler.testing.reference import as_saved
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine

WANT = (Output("logprobs"), Output("entropy"))
PROMPT = 9  # tokens; more than mistral's window below
SHAPE = {
    "vocab_size": 321,  # no multiple of 2 or 4: shards are uneven
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False, attention_bias=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, tie_word_embeddings=True, sliding_window=7, head_dim=12),
    "experts": Qwen3MoeConfig(
        **SHAPE,
        head_dim=12,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=False,
    ),  # no multiple of 2 or 4 either
    # layers that drop by a function, not by a module
    "dropout": SeedOssConfig(**SHAPE, head_dim=12, residual_dropout=0.5, attention_dropout=0.5),
    # moments in 8 bits: rows of 64 and of 128, and weights that are too small
    "blocks": Qwen3Config(
        **{**SHAPE, "hidden_size": 64, "intermediate_size": 128},
        head_dim=16,
        tie_word_embeddings=False,
    ),
    "wide-experts": Qwen3MoeConfig(
        **{**SHAPE, "hidden_size": 64},
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        tie_word_embeddings=False,
    ),
    "six-heads": Qwen2Config(**{**SHAPE, "num_attention_heads": 6}, tie_word_embeddings=False),
    "eight-heads": Qwen2Config(**{**SHAPE, "num_attention_heads": 8}, tie_word_embeddings=False),
    "wide": Qwen3Config(
        **SHAPE, head_dim=64, tie_word_embeddings=False
    ),  # as flash-attn-4 takes them
}


def write_model(folder: Path, config: PreTrainedConfig, max_shard_size: str = "5GB") -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with (
        torch.no_grad()
        # transformers starts biases at 0 and norms at 1, where some mistakes cannot be
        # seen
    ):
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_engine(
    folder: Path, rank: Rank | None = None, *, frozen: bool = False, **settings: object
) -> FSDPEngine:
    engine = FSDPEngine(
        FSDPConfig(**{"gradient_checkpointing": False, **settings}),
        Model(str(folder), frozen=frozen),
    )
    engine.setup(rank or Rank())
    return engine


def parameter_bytes(engine: FSDPEngine) -> dict[str, int]:
    """Bytes of the parameters that this rank holds, masters included, by dtype."""
    held = {id(p): p for p in engine.policy.parameters()}
    held |= {id(p): p for pair in engine.masters.pairs.values() for p in pair}
    found: dict[str, int] = {}
    for parameter in held.values():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        name = str(local.dtype)
        found[name] = found.get(name, 0) + local.nbytes
    return found


def make_batch(count: int = 10, seed: int = 0) -> Batch:
    """Ragged sequences, some tokens trained, each at its own temperature; the first
    three have one prompt.
    """
    random = np.random.default_rng(seed)
    lengths = np.concatenate(
        [random.integers(PROMPT + 1, 30, 3), random.integers(1, 30, count - 3)]
    )
    total = int(lengths.sum())
    mask = random.random(total) < 0.6
    starts = np.cumsum(lengths) - lengths
    mask[starts] = False
    tokens = random.integers(0, SHAPE["vocab_size"], total).astype(np.int32)
    for start in starts[:3]:
        mask[start : start + PROMPT] = False
        tokens[start : start + PROMPT] = tokens[:PROMPT]
    columns = {
        "tokens": tokens,
        "loss_mask": mask,
        "loss_weight": (mask * random.uniform(0.1, 1, total)).astype(np.float32),
        "advantages": random.normal(size=total).astype(np.float32),
    }
    return Batch(
        lengths, columns, {"temperature": random.uniform(0.5, 1.5, count).astype(np.float32)}
    )


def loss(out: Columns, batch: Columns) -> tuple[torch.Tensor, Metrics]:
    """Not linear in the log-probs, and with an entropy term."""
    token_loss = (
        -batch["advantages"] * out["logprobs"].exp() - 0.1 * out["logprobs"] - 0.3 * out["entropy"]
    )
    return token_loss, {"tokens": Metric(batch["loss_mask"].sum(), how="sum")}


def info(batch: Batch, index: int = 0) -> StepInfo:
    return StepInfo(batch.num_tokens, index)


@cache
def reference(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs [T] of ``make_batch`` and gradients by name, one sequence at a time with
    eager attention.
    """
    batch = make_batch(seed=seed)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **eager)
    outputs: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": []}
    for i in range(len(batch)):
        one = batch.take([i])
        tokens, mask = torch.from_numpy(one["tokens"]).long(), torch.from_numpy(one["loss_mask"])
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / float(
            one["temperature"][0]
        )
        log_p = (
            torch.cat([torch.zeros_like(logits[:1]), logits.log_softmax(-1)])
            if len(logits)
            else logits.new_zeros(1, 321)
        )
        picked = log_p.gather(1, tokens[:, None]).squeeze(1)
        outputs["logprobs"].append(torch.where(mask, picked, 0.0))
        outputs["entropy"].append(torch.where(mask, -(log_p.exp() * log_p).sum(-1), 0.0))
    out = {name: torch.cat(parts) for name, parts in outputs.items()}
    token_loss, _ = loss(
        out, {name: torch.from_numpy(column) for name, column in batch.tokens.items()}
    )
    (token_loss * torch.from_numpy(batch["loss_weight"])).sum().backward()
    grads: dict[str, np.ndarray] = {}
    for name, grad in arrays(
        (name, parameter.grad) for name, parameter in model.named_parameters()
    ).items():
        grads |= as_saved(name, grad)
    return arrays((name, values.detach()) for name, values in out.items()), grads


def arrays(named: Iterable[Named]) -> dict[str, np.ndarray]:
    """NumPy has no bf16."""
    return {
        name: np.array((t.float() if t.dtype == torch.bfloat16 else t).cpu()) for name, t in named
    }


def closeness(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """Cosine of the angle between two whole gradients, times the ratio of their
    lengths, at most 1.
    """
    a, b = (np.concatenate([g[n].ravel() for n in want]).astype(np.float64) for g in (got, want))
    lengths = sorted((np.linalg.norm(a), np.linalg.norm(b)))
    return float(a @ b / (lengths[0] * lengths[1]) * lengths[0] / lengths[1])


def worst(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """max|dg| / max|g| over the tensors; one whose gradient all but cancels is measured
    against the whole.
    """
    assert got.keys() == want.keys()
    whole = max(float(np.abs(g).max()) for g in want.values())
    return max(
        float(np.abs(got[n] - g).max()) / max(float(np.abs(g).max()), 1e-2 * whole)
        for n, g in want.items()
    )


def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine's checks find no torchao."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "coupler_engine_fsdp.layout.find_spec",
        lambda name: None if name == "torchao" else found(name),
    )
