"""Hash files by chunks with SHA-256.

Threads share a large file. A file that is written is hashed meanwhile, from memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from coupler.system.threads import DaemonThreads

# The part of a file that is under one hash. The last chunk may be shorter.
CHUNK_BYTES = 32 << 20
THREADS = min(8, os.cpu_count() or 1)
# Threads that read. Some of them wait for the disk.
READERS = min(16, 2 * (os.cpu_count() or 1))
# Bytes that are read at a time.
BLOCK_BYTES = 1 << 20


def write_file(path: Path, pieces: Iterable[memoryview]) -> list[str]:
    """Write ``pieces`` of bytes to a file, and return the hash of each chunk.

    The pieces are written as they come, and flushed to the disk in the end. A piece may
    not change before this returns, because other threads hash it.
    """
    with path.open("wb") as file, ThreadPoolExecutor(THREADS, "hash") as threads:
        # The call takes every piece before it returns.
        hashes = threads.map(_hash, _chunks(_written(pieces, file)))
        file.flush()
        os.fsync(file.fileno())
        return list(hashes)


def hash_files(paths: Sequence[Path], chunk_bytes: int = CHUNK_BYTES) -> list[list[str]]:
    """Read files, and return the hash of each chunk of each."""
    starts = [range(0, path.stat().st_size, chunk_bytes) for path in paths]
    ranges = [(path, start) for path, found in zip(paths, starts, strict=True) for start in found]
    with DaemonThreads(min(READERS, len(ranges)), "hash") as threads:
        hashes = threads.map(lambda found: _hash(_read(found[0], found[1], chunk_bytes)), ranges)
        return [[next(hashes) for _ in found] for found in starts]


def hash_start(path: Path, size: int) -> str:
    """Return the hash of the first ``size`` bytes of a file."""
    return _hash(_read(path, 0, size))


def _hash(data: Iterable[memoryview]) -> str:
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def _written(pieces: Iterable[memoryview], file: BinaryIO) -> Iterator[memoryview]:
    begun = end = 0
    for piece in pieces:
        end += file.write(piece)
        yield piece
        if end - begun >= CHUNK_BYTES:
            _begin(file, begun, end)
            begun = end


def _begin(file: BinaryIO, start: int, end: int) -> None:
    """Let the disk begin with the bytes that were written.

    Linux would leave them in memory until the flush at the end.
    """
    if hasattr(os, "posix_fadvise"):
        file.flush()
        os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def _chunks(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    chunk, room = list[memoryview](), CHUNK_BYTES
    for piece in pieces:
        while len(piece):
            chunk.append(piece[:room])
            piece, room = piece[room:], room - len(chunk[-1])
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def _read(path: Path, start: int, size: int) -> Iterator[memoryview]:
    """Yield a part of a file piece by piece, in one buffer that is used again."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, size)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size and (count := file.readinto(buffer[:size])):
            yield buffer[:count]
            size -= count
