"""A server of SandboxFusion's protocol, which runs programs in the sandbox."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from coupler_agents.sandbox import run_python


class Handler(BaseHTTPRequestHandler):
    """Answer ``POST /run_code``. A server may have an answer that it always gives."""

    def do_POST(self) -> None:
        server: Any = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, asked))
        status, answer = server.fixed or (200, json.dumps(answered(asked)))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def answered(asked: dict[str, Any]) -> dict[str, Any]:
    """Run what is asked for."""
    assert asked["language"] == "python"
    ran = run_python(
        asked["code"],
        stdin=asked["stdin"],
        files={name: base64.b64decode(data).decode() for name, data in asked["files"].items()},
        fetch=asked["fetch_files"],
        timeout_s=asked["run_timeout"],
    )
    result = {
        "status": "TimeLimitExceeded" if ran.timed_out else "Finished",
        "execution_time": 0.1,
        "return_code": None if ran.timed_out else ran.code,
        "stdout": ran.stdout,
        "stderr": ran.stderr,
    }
    files = {name: base64.b64encode(data).decode() for name, data in ran.files.items()}
    return {
        "status": "Failed" if ran.code else "Success",
        "message": "",
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": files,
    }


@contextmanager
def serving(fixed: tuple[int, str] | None = None) -> Iterator[tuple[str, list[Any]]]:
    """Serve, and yield the address and what it was asked."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.fixed = [], fixed
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked
    finally:
        server.shutdown()
        server.server_close()
