"""Ask the server of an inference engine for what a model says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

MESSAGES = [{"role": "user", "content": "what is 7 + 2 ?"}]
LIMIT_S = 200


def prompt_ids(folder: Path) -> list[int]:
    """Return the ids of :data:`MESSAGES`, by the tokenizer of a model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)


def ask_server(
    command: Sequence[str],
    path: str,
    body: Mapping[str, Any],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start a server, post to it as soon as it answers, and end it.

    Args:
        command: what this Python is given. Host and port are added.
        path: of the request, from ``/`` on.
        log: the file of what the server prints.
        environment: variables that the server has besides those of this process.

    Raises:
        AssertionError: the server ended, or did not answer within :data:`LIMIT_S`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ("--host", "127.0.0.1", "--port", str(port))

    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, *command, *address],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        try:
            return _answer(server, f"http://127.0.0.1:{port}{path}", body)
        finally:
            server.terminate()
            server.wait(60)


def _answer(server: subprocess.Popen[bytes], url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    kind = {"Content-Type": "application/json"}
    request = Request(url, json.dumps(body).encode(), kind)  # noqa: S310 (our own address)

    until = time.monotonic() + LIMIT_S
    while True:
        try:
            with urlopen(request, timeout=60) as response:  # noqa: S310
                return json.load(response)
        except URLError:
            assert server.poll() is None and time.monotonic() < until, "the server does not answer"
            time.sleep(0.5)
