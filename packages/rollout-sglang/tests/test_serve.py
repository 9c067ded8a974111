"""SGLang's own server takes what a run exports, and says what transformers says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from test_train import arguments
from transformers import AutoTokenizer

from coupler.cli import main
from coupler.testing.reference import TransformersReference

MESSAGES = [{"role": "user", "content": "what is 7 + 2 ?"}]
TOKENS = 16
LIMIT_S = 200
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
    prompt = AutoTokenizer.from_pretrained(export).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ("--model-path", str(export), "--host", "127.0.0.1", "--port", str(port))
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, *SERVER, *address],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        )
        try:
            said = asked(server, port, prompt)
        finally:
            server.terminate()
            server.wait(60)
    assert said == TransformersReference(export).greedy(prompt, TOKENS)


def asked(server: subprocess.Popen[bytes], port: int, prompt: list[int]) -> list[int]:
    """The ids that the server answers to a greedy request, as soon as it answers."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = Request(
        f"http://127.0.0.1:{port}/generate",
        json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode(),
        {"Content-Type": "application/json"},
    )
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            with urlopen(request, timeout=60) as response:
                return json.load(response)["output_ids"]
        except URLError:
            assert server.poll() is None and time.monotonic() < until, "the server does not answer"
            time.sleep(0.5)
