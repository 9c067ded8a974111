"""Check binary files before a library reads them.

A hostile archive or header makes its reader allocate, wait or unpickle. These checks
cost no more than a small part of the file, and read no value from it.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from coupler.system.files import read_json, reading

MAX_MEMBERS = 65_536
MAX_NPY_HEADER_BYTES = 16 << 10
MAX_TENSOR_HEADER_BYTES = 32 << 20
MAX_DIMENSIONS = 64
# Bits of an element, by the name of its type in a safetensors header.
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def check_file(path: Path) -> None:
    """Check a file of a checkpoint by the ending of its name.

    Raises:
        DamagedFile: it is not of the format that its name says.
    """
    checks: dict[str, Callable[[Path], object]] = {
        ".npz": check_archive,
        ".safetensors": check_tensors,
        ".json": lambda json_path: read_json(json_path, object),
    }
    if check := checks.get(path.suffix):
        check(path)


def check_archive(path: Path) -> None:
    """Check that ``path`` is an uncompressed ``.npz`` of plain arrays.

    Every array says how large it is, and the file holds just that.

    Raises:
        DamagedFile: it is none.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        if len(members) > MAX_MEMBERS or len(set(names)) != len(names):
            raise ValueError("it has too many arrays, or two of one name")
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("its arrays are larger than the file")

        for member in members:
            name = member.filename
            if not name.endswith(".npy") or name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"{name[:80]!r} is no name of an array")
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise ValueError(f"{name[:80]} is compressed or encrypted")
            with archive.open(member) as file:
                _check_array(file, member.file_size, name[:80])


def _check_array(file: Any, size: int, name: str) -> None:
    head = io.BytesIO(file.read(MAX_NPY_HEADER_BYTES))
    version = np.lib.format.read_magic(head)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(head)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(head)
    else:
        raise ValueError(f"{name} is of an unknown version {version}")

    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects")
    if any(length < 0 for length in shape):
        raise ValueError(f"{name} has a negative shape")
    if math.prod(map(int, shape)) * dtype.itemsize != size - head.tell():
        raise ValueError(f"{name} does not have the size that its header says")


def check_tensors(path: Path) -> None:
    """Check the header of a safetensors file against the size of the file.

    Raises:
        DamagedFile: it is none, or tensors overlap or lie outside of the file.
    """
    with reading(path), path.open("rb") as file:
        _check_header(file, path.stat().st_size)


def _check_header(file: BinaryIO, size: int) -> None:
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, MAX_TENSOR_HEADER_BYTES):
        raise ValueError("its header is longer than the file, or than any header")
    header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_duplicates)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    about = header.get("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise ValueError("the metadata of its header is no mapping of texts")

    ranges = sorted(
        _range_of(name[:80], entry) for name, entry in header.items() if name != "__metadata__"
    )
    end = 0
    for first, last in ranges:
        if first < end or last > size - 8 - length:
            raise ValueError("tensors overlap, or lie outside of the file")
        end = last
    if end != size - 8 - length:
        raise ValueError("the file is longer than its tensors")


def _range_of(name: str, entry: Any) -> tuple[int, int]:
    dtype, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
    if dtype not in BITS:
        raise ValueError(f"{name} is of an unknown type {str(dtype)[:20]!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has no shape or no place in the file")
    if math.prod(shape) * BITS[dtype] != 8 * (offsets[1] - offsets[0]):
        raise ValueError(f"{name} does not have the size that its shape says")
    return offsets[0], offsets[1]


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("two entries of its header have one name")
    return found
