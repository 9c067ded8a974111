"""What a run says of the code that it ran: not where it was started, but where that
code is.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from coupler.run.provenance import checkouts
from coupler.system.imports import file_of


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_checkouts_are_those_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text("def score(): ...\n")
        git(tmp_path / name, "init", "-q")
        git(tmp_path / name, "add", "reward.py")
        git(tmp_path / name, "commit", "-q", "-m", name)
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "mine" / ".venv").mkdir()
    # of an environment: git does not track it
    (tmp_path / "mine" / ".venv" / "package.py").touch()
    files = {
        "reward": tmp_path / "mine" / "reward.py",
        "engine": tmp_path / "mine" / ".venv" / "package.py",
    }
    files["algorithm"] = tmp_path / "no_repository.py"
    commit = git(tmp_path / "mine", "rev-parse", "HEAD")
    here = {"folder": str(tmp_path / "mine"), "commit": commit, "modified": False, "of": ["reward"]}
    assert checkouts(files) == [here]
    (tmp_path / "mine" / "reward.py").write_text("def score(): return 1\n")
    assert checkouts(files) == [{**here, "modified": True}]


def test_the_file_of_a_target() -> None:
    assert file_of("a/r.py:score") == Path("a/r.py")
    assert file_of("pytest.x.y:Z") == Path(pytest.__file__)
    assert not any(map(file_of, ("no_such_package:a", "", "a")))
