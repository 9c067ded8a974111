"""Counted operations are those that PyTorch counts in real models; a run logs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job_run import metrics, run
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from coupler.run.throughput import Throughput, forward_flops, peak_of
from coupler.testing.models import write_qwen2

LENGTH = 24
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 50,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 32},
    "olmo2": SMALL,
    "smollm3": SMALL,
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": SMALL | EXPERTS | {"shared_expert_intermediate_size": 80, "mlp_only_layers": [0]},
    "qwen3_moe": SMALL | EXPERTS | {"head_dim": 32, "decoder_sparse_step": 2},
}


def counted(config: Any) -> int:
    """The operations of a forward pass over one sequence, as PyTorch counts them."""
    how = {"attn_implementation": "eager"}
    if getattr(config, "num_experts_per_tok", 0):
        how["experts_implementation"] = "eager"  # PyTorch does not count grouped products
    model = AutoModelForCausalLM.from_config(config, **how)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.randint(0, config.vocab_size, (1, LENGTH)))
    return counter.get_total_flops()


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_that_pytorch_counts(family: str) -> None:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    shape = config.to_dict()
    heads, size = shape["num_attention_heads"], shape.get("head_dim") or 64 // 4
    # PyTorch counts all pairs of tokens, of which the causal half is needed.
    other_half = 2 * shape["num_hidden_layers"] * heads * size * LENGTH**2
    ours = forward_flops(shape, np.array([LENGTH])) + other_half

    # The rotary embedding takes a small product of its own.
    assert ours == pytest.approx(counted(config), rel=1e-3)


def test_other_families_are_not_guessed() -> None:
    assert forward_flops(SMALL | {"model_type": "mamba"}, np.array([4])) == 0
    assert forward_flops({}, np.array([4])) == 0


def test_names_of_the_driver_are_known() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3") == peak_of("NVIDIA H200") == 989.4e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA GeForce RTX 2060") == peak_of("") == 0


@pytest.mark.parametrize("job", ["train", "sft"])
def test_a_run_logs_them(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU of a known peak, which takes part in nothing else."""
    monkeypatch.setattr("coupler.run.throughput.device_name", lambda: "NVIDIA H200")
    seen: list[float] = []
    saw = Throughput.saw

    def noted(self: Throughput, batch: Any) -> Any:
        seen.append(3 * forward_flops(self.shape, batch.lengths))
        return saw(self, batch)

    monkeypatch.setattr(Throughput, "saw", noted)
    model = write_qwen2(tmp_path / "model", tied=True)
    assert json.loads((model / "config.json").read_text())["model_type"] == "qwen2"

    log = metrics(run(job, model, tmp_path / "run"))
    steps = [step for step in log if "time/train" in step]
    assert len(steps) == len(seen) == 3
    for step, flops in zip(steps, seen, strict=True):
        rate = flops / step["time/train"]
        assert step["time/train_tflops_per_gpu"] == pytest.approx(rate / 1e12)
        assert step["time/train_mfu"] == pytest.approx(rate / 989.4e12)
        per_gpu = step["time/tokens_per_second_per_gpu"]
        assert per_gpu == pytest.approx(step["time/tokens_per_second"])
