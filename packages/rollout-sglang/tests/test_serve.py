"""SGLang's own server takes what a run exports, and says what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_train import arguments

from coupler.cli import main
from coupler.testing.reference import TransformersReference
from coupler.testing.serving import ask_server, prompt_ids

TOKENS = 16
# What the README says to start, and what this CPU asks for.
SERVER = ("-m", "sglang.launch_server", "--device", "cpu", "--dtype", "float32",
          "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
          "--max-total-tokens", "512", "--context-length", "256", "--grammar-backend", "none",
          "--sampling-defaults", "openai", "--skip-server-warmup")  # fmt: skip


@pytest.mark.slow
def test_sglang_serves_an_export(
    kernels: None, tmp_path: Path, reference: TransformersReference
) -> None:
    settings = ("rollout=hf", "steps=1", "engine.lr=1e-3")
    assert main([*arguments(tmp_path, reference)[:-2], *settings, "algorithm=grpo"]) == 0
    export = tmp_path / "run" / "export"
    prompt = prompt_ids(export)
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    said = ask_server(
        (*SERVER, "--model-path", str(export)),
        "/generate",
        {"input_ids": prompt, "sampling_params": sampling},
        tmp_path / "server.log",
        {"SGLANG_USE_CPU_ENGINE": "1"},
    )
    assert said["output_ids"] == TransformersReference(export).greedy(prompt, TOKENS)
