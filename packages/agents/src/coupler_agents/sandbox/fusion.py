"""Run programs at a URL, by the protocol of SandboxFusion.

``POST URL/run_code`` takes a program as JSON, and files as base64. The answer is
``{"status", "message", "run_result": {"status", "return_code", "stdout", "stderr"},
"files"}``, as ``sandbox/server/sandbox_api.py`` of
https://github.com/bytedance/SandboxFusion has it.
"""

from __future__ import annotations

import base64
import binascii
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from coupler_agents.sandbox.limits import SandboxLimits
from coupler_agents.sandbox.ran import Ran, SandboxFailed, clean

# Seconds for the server beside those of the program, and bytes of its answer.
SERVER_S = 30.0
MAX_ANSWER = 32 << 20


def check_url(url: str, where: str) -> None:
    """Refuse what is no address of a server.

    Raises:
        SandboxFailed: it is none.
    """
    if not url.startswith(("http://", "https://")):
        raise SandboxFailed(f"{where}={url} is no address.\n  write:  http://HOST:PORT")


def run_at(
    url: str,
    code: str,
    timeout_s: float,
    files: Mapping[str, str],
    stdin: str,
    fetch: Sequence[str],
    limits: SandboxLimits,
) -> Ran:
    """Run a program at a server, and wait for its end.

    Raises:
        SandboxFailed: the server cannot be reached, or says that it failed.
    """
    check_url(url, "url")

    body = {
        "code": clean(code),
        "language": "python",
        "run_timeout": timeout_s,
        "memory_limit_MB": int(limits.memory_gib * 1024),
        "stdin": stdin,
        "files": {name: _encoded(text) for name, text in files.items()},
        "fetch_files": list(fetch),
    }

    answer = _asked(url, body, timeout_s)
    try:
        return _read(answer, limits.output_bytes)
    except (LookupError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise SandboxFailed(
            f"{url} does not answer as a SandboxFusion server does: {type(error).__name__}: {error}"
        ) from None


def _asked(url: str, body: Mapping[str, Any], timeout_s: float) -> Any:
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        f"{url.rstrip('/')}/run_code",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )

    try:
        with urllib.request.urlopen(  # noqa: S310
            request, timeout=timeout_s + SERVER_S
        ) as response:
            data = response.read(MAX_ANSWER + 1)
        if len(data) > MAX_ANSWER:
            raise ValueError(f"it is longer than {MAX_ANSWER} bytes")
        return json.loads(data)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode("utf-8", "replace")
        raise SandboxFailed(f"the sandbox at {url} answers {error.code}: {said}") from None
    except (OSError, HTTPException) as error:
        raise SandboxFailed(
            f"the sandbox at {url} cannot be reached: {error}\n  try:  start its server"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SandboxFailed(f"the sandbox at {url} does not answer in JSON: {error}") from None


def _read(answer: Mapping[str, Any], limit: int) -> Ran:
    if answer["status"] == "SandboxError":
        raise SandboxFailed(f"the sandbox failed: {str(answer['message'])[:300]}")

    result = answer["run_result"]
    timed_out = result["status"] == "TimeLimitExceeded"
    code = result.get("return_code")
    return Ran(
        _cut(result.get("stdout"), limit),
        _cut(result.get("stderr"), limit),
        code=int(code) if code is not None else 137 if timed_out else 1,
        files={name: base64.b64decode(data) for name, data in answer.get("files", {}).items()},
        timed_out=timed_out,
    )


def _cut(text: str | None, limit: int) -> str:
    found = clean(text or "")
    return found if len(found) <= limit else f"{found[:limit]}\n... ({len(found) - limit} more)\n"


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()
