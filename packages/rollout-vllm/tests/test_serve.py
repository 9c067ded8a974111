"""vLLM's own server takes what a run exports, and says what transformers says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from test_train import run
from transformers import AutoTokenizer

from coupler.testing.reference import TransformersReference

MESSAGES = [{"role": "user", "content": "what is 7 + 2 ?"}]
TOKENS = 16
LIMIT_S = 200
# What `vllm serve` starts, which looks for a distribution that is called vllm.
SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--dtype", "float32",
          "--max-model-len", "256", "--gpu-memory-utilization", "0.3",
          "--generation-config", "vllm")  # fmt: skip


@pytest.mark.slow
def test_vllm_serves_an_export(tmp_path: Path, reference: TransformersReference) -> None:
    run(tmp_path, reference, "rollout=hf", "steps=1", "engine.lr=1e-3")
    export = tmp_path / "run" / "export"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ("--model", str(export), "--host", "127.0.0.1", "--port", str(port))
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, *SERVER, *address], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            said = asked(server, port, {"messages": MESSAGES, "max_tokens": TOKENS})
        finally:
            server.terminate()
            server.wait(60)
    assert said == from_transformers(export)


def asked(server: subprocess.Popen[bytes], port: int, body: dict[str, object]) -> list[int]:
    """The ids that the server answers to a greedy request, as soon as it answers."""
    request = Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(
            body | {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        ).encode(),
        {"Content-Type": "application/json"},
    )
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            with urlopen(request, timeout=60) as response:
                return json.load(response)["choices"][0]["token_ids"]
        except URLError:
            assert server.poll() is None and time.monotonic() < until, "the server does not answer"
            time.sleep(0.5)


def from_transformers(folder: Path) -> list[int]:
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    return TransformersReference(folder).greedy(prompt, TOKENS)
