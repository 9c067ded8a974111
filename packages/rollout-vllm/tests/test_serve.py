"""vLLM's own server takes what a run exports, and says what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_train import run

from coupler.testing.reference import TransformersReference
from coupler.testing.serving import MESSAGES, ask_server, prompt_ids

TOKENS = 16
# What `vllm serve` starts, which looks for a distribution that is called vllm.
SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--dtype", "float32",
          "--max-model-len", "256", "--gpu-memory-utilization", "0.3",
          "--generation-config", "vllm")  # fmt: skip


@pytest.mark.slow
def test_vllm_serves_an_export(tmp_path: Path, reference: TransformersReference) -> None:
    run(tmp_path, reference, "rollout=hf", "steps=1", "engine.lr=1e-3")
    export = tmp_path / "run" / "export"
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    said = ask_server(
        (*SERVER, "--model", str(export)),
        "/v1/chat/completions",
        {"messages": MESSAGES, "return_token_ids": True, **sampling},
        tmp_path / "server.log",
    )
    want = TransformersReference(export).greedy(prompt_ids(export), TOKENS)
    assert said["choices"][0]["token_ids"] == want
