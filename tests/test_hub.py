"""Models and data sets by their names on the Hub, from a server of these files on this
machine, and without one. Tables of commas and tabs.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from job_run import arguments, metrics, write_inputs

from coupler.data import load_rows
from coupler.data.hub import is_name
from coupler.data.options import DataConfig
from coupler.errors import DataError
from coupler.testing.models import write_qwen2

COMMIT = "c0ffee" + "0" * 34
GONE = "http://127.0.0.1:9"  # nothing listens at the port of discard


class Hub(BaseHTTPRequestHandler):
    """Serves the folders of ``held``, by the part of the Hub's API that downloads."""

    protocol_version = "HTTP/1.1"
    held: ClassVar[dict[str, Path]] = {}

    def log_message(self, *_: object) -> None:
        """The test shows what matters."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        about = path.startswith("api/")
        name = path.removeprefix("api/").removeprefix("models/")
        repo = next((each for each in self.held if name.startswith(f"{each}/")), "")
        if not repo:
            return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})

        folder, rest = self.held[repo], name.removeprefix(f"{repo}/")
        files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        if about and rest.startswith("revision/"):
            listed = [{"rfilename": file} for file in files]
            return self.answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": listed}))
        if about and rest.startswith("tree/"):
            entries = [
                {"type": "file", "path": f, "size": (folder / f).stat().st_size, "oid": digest(f)}
                for f in files
            ]
            return self.answer(200, json.dumps(entries))

        file = rest.removeprefix(f"resolve/{COMMIT}/")
        content = (folder / file).read_bytes()
        return self.answer(200, content, {"ETag": f'"{digest(file)}"', "X-Repo-Commit": COMMIT})

    def answer(self, status: int, body: bytes | str, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else body.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def digest(file: str) -> str:
    return hashlib.sha1(file.encode()).hexdigest()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Hub with a model and a data set of two splits."""
    folder = tmp_path_factory.mktemp("hub")
    model = write_qwen2(folder / "model", tied=True)
    (folder / "rows" / "data").mkdir(parents=True)
    for split, size in (("train", 6), ("test", 2)):
        table = "question,answer\n" + "".join(f"what is {i} + 2 ?,{i + 2}\n" for i in range(size))
        (folder / "rows" / "data" / f"{split}.csv").write_text(table)

    Hub.held = {"acme/tiny": model, "datasets/acme/sums": folder / "rows"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def call(
    folder: Path, endpoint: str, *words: str, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "coupler", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_run_names_its_model_and_its_rows(hub: str, tmp_path: Path) -> None:
    """Downloaded once; then the cache serves without a network."""
    write_inputs(tmp_path)
    words = arguments("sft", Path("acme/tiny"), tmp_path, tmp_path / "run")
    named = [
        "data.source=acme/sums", "data.split=train", "data.prompt_key=question",
        "trackers=[jsonl]", "checkpoint.export=false",
    ]  # fmt: skip
    done = call(tmp_path, hub, *words, *named)
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "run")) == 3

    again = call(tmp_path, GONE, *words, *named, f"run_dir={tmp_path / 'again'}", offline=True)
    assert again.returncode == 0, again.stderr
    assert metrics(tmp_path / "again")[-1]["loss"] == metrics(tmp_path / "run")[-1]["loss"]


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_it_says_what_to_type(offline: bool, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    words = arguments("sft", Path("acme/tiny"), tmp_path, tmp_path / "run")
    done = call(tmp_path, GONE, *words, offline=offline)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "model.path=acme/tiny is no file or folder here" in done.stderr
    assert "hf download acme/tiny --local-dir FOLDER" in done.stderr

    model = write_qwen2(tmp_path / "model", tied=True)
    named = [f"model.path={model}", "data.source=acme/sums"]
    done = call(tmp_path, GONE, *words, *named, offline=offline)
    assert done.returncode == 2
    assert "hf download --repo-type dataset acme/sums --local-dir FOLDER" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_name_that_the_hub_has_not(hub: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    words = arguments("sft", Path("acme/tinny"), tmp_path, tmp_path / "run")
    done = call(tmp_path, hub, *words)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "the Hub has no model of that name that you may see" in done.stderr


def test_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_name("Qwen/Qwen3-0.6B") and is_name("Qwen/Qwen3-0.6B@refs/pr/1")
    for path in ("models/absent", "./a/b", "/a/b", "a/b/c", "../a", "a", "m.py:f", "a/b c", "a//b"):
        assert not is_name(path), path


@pytest.mark.parametrize(("suffix", "between"), [(".csv", ","), (".tsv", "\t")])
def test_tables(suffix: str, between: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    quoted = f'"two{between} ""quoted""\nlines"'
    path.write_text(f"\ufeffprompt{between}answer{between}level\n{quoted}{between}7{between}1\n\n")
    (row,) = load_rows(DataConfig(source=str(path)))
    assert (row.prompt, row.answer) == (f'two{between} "quoted"\nlines', "7")
    assert row.extra["level"] == "1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"prompt,answer\na,b,c\n", "line 2 is no table: it has 3 values for 2 columns"),
        (b"prompt,prompt\na,b\n", "line 1 is no table: its first line has no name for each column"),
        (b'prompt,answer\n"a,b\n', "is no table: unexpected end of data"),
        (b"prompt,answer\n\xff,b\n", "is no table: 'utf-8' codec can't decode"),
        (b"prompt,answer\n", "has no rows"),
    ],
)
def test_what_is_no_table_is_named(text: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text)
    with pytest.raises(DataError) as raised:
        load_rows(DataConfig(source=str(path)))
    assert why in str(raised.value)
