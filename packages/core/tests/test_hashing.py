"""Hashes of chunks: the same from memory while a file is written as from the file, and
plain SHA-256.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from coupler.system.hashing import hash_files, write_file

CHUNK = 100
CONTENT = np.random.default_rng(0).bytes(950)
HASHES = [hashlib.sha256(CONTENT[i : i + CHUNK]).hexdigest() for i in range(0, 950, CHUNK)]


@pytest.mark.parametrize("cuts", [[], [100, 200], [1, 1, 99, 101, 450, 949]])
def test_what_is_written_is_hashed_wherever_pieces_begin(
    cuts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coupler.system.hashing.CHUNK_BYTES", CHUNK)
    pieces = [CONTENT[a:b] for a, b in zip([0, *cuts], [*cuts, len(CONTENT)], strict=True)]
    assert write_file(tmp_path / "file", map(memoryview, pieces)) == HASHES
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_files_are_read_for_their_hashes(tmp_path: Path) -> None:
    contents = {
        "whole": CONTENT,
        "empty": b"",
        "short": b"abc",
        "altered": CONTENT[:350] + b"!" + CONTENT[351:],
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = dict(
        zip(contents, hash_files([tmp_path / name for name in contents], CHUNK), strict=True)
    )
    assert found["whole"] == HASHES and found["empty"] == []
    assert (
        found["short"]
        == hash_files([tmp_path / "short"])[0]
        == [hashlib.sha256(b"abc").hexdigest()]
    )
    assert [
        i
        for i, pair in enumerate(zip(found["altered"], HASHES, strict=True))
        if len(set(pair)) == 2
    ] == [3]


def test_what_fails_to_be_written_is_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        write_file(tmp_path / "absent" / "file", [memoryview(b"abc")])
