"""Read records from files or a function, each with its place for messages."""

from __future__ import annotations

import csv
import inspect
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from coupler.data.files import chosen, files, is_function, no_split
from coupler.data.options import DataConfig
from coupler.errors import CouplerError, DataError, place_of
from coupler.system.imports import resolve

Records = Iterator[tuple[str, Any]]  # (place, record)
# The longest row of a .jsonl file.
MAX_LINE_BYTES = 64 << 20
# A file of Parquet with more than this many times its size of values is refused. One
# below a MiB counts as a MiB.
MAX_GROWTH = 500
ROWS_AT_ONCE = 128
EXAMPLE = '  a row is one line of JSON:  {"prompt": "1 + 2 = ?", "answer": "3"}'


def read(config: DataConfig, key: str = "data") -> Records:
    """Read the records of ``config.source``, one source after the other.

    ``key`` is the section of the configuration that ``config`` is, for messages.

    Raises:
        DataError: a source is missing, empty or malformed, or its function cannot be
            found or does not take ``config.args``.
    """
    if not config.source:
        raise DataError(f"{key}.source is not set.\n  try:  {key}.source=train.jsonl")

    functions = [source for source in config.sources if is_function(source)]
    if functions:
        _check_alone(functions[0], config, key)
        return _function(functions[0], config.args, key)

    if config.args:
        raise DataError(
            f"{key}.args has {', '.join(config.args)}, but {key}.source={config.named} is no "
            f"function.\n  try:  {key}.args={{}}"
        )
    # All are opened before the first row, so that a missing one is found at once.
    opened = [
        _opened(path, config.split, key)
        for source in config.sources
        for path in files(source, config.split, key)
    ]
    return chain.from_iterable(opened)


def _check_alone(function: str, config: DataConfig, key: str) -> None:
    """Refuse what a function does not take: other sources beside it, and a split."""
    if len(config.sources) > 1:
        raise DataError(
            f"{key}.source lists {function}, and a function stands alone.\n"
            "  try:  a function that yields the rows of all"
        )
    if config.split:
        raise DataError(no_split(function, config.split, key))


def _opened(path: Path, split: str, key: str) -> Records:
    """Open one file, or a folder that the package datasets saved."""
    readers = {
        ".jsonl": _jsonl,
        ".json": _json,
        ".parquet": _parquet,
        ".csv": _csv,
        ".tsv": partial(_csv, delimiter="\t"),
    }

    if path.is_dir():
        return _saved(path, split, key)
    if path.stat().st_size == 0:
        raise DataError(f"{key}.source: {path} is empty.\n{EXAMPLE}")
    return readers[path.suffix](path)


def _jsonl(path: Path) -> Records:
    with path.open("rb") as lines:
        for number in count(1):
            line = lines.readline(MAX_LINE_BYTES + 1)
            place = f"{path}, line {number}"
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{place} has more than {MAX_LINE_BYTES} bytes.\n{EXAMPLE}")
            if line.strip():
                yield place, _parse(line, place)


def _json(path: Path) -> Records:
    with path.open("rb") as file:
        start = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    # A large file of something else is not read whole.
    whole = path.stat().st_size <= MAX_LINE_BYTES or start.startswith((b"[", b"{"))

    records = _parse(path.read_bytes() if whole else start[:80], str(path))
    if not isinstance(records, list):
        raise DataError(
            f"{path} holds a {type(records).__name__}, not a list of rows.\n  try:  one row a "
            "line, as .jsonl"
        )
    return _numbered(path, iter(records))


def _parse(text: bytes, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_mapping)
    except (ValueError, RecursionError, MemoryError) as error:
        # A ValueError is raised for text that is not UTF-8, too.
        why = str(error)[:200] if isinstance(error, ValueError) else "it is nested too deep"
        raise DataError(f"{place} is not JSON: {why}.\n{EXAMPLE}") from None


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has two values of {twice[:80]!r}")
    return found


def _csv(path: Path, delimiter: str = ",") -> Records:
    """Read the rows under a line of names. Every value is a text."""
    csv.field_size_limit(MAX_LINE_BYTES)

    with path.open(encoding="utf-8-sig", errors="strict", newline="") as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        place = f"{path}, line 1"
        try:
            names = next(rows, [])
            if not all(names) or len({*names}) != len(names):
                raise ValueError("its first line has no name for each column, each once")

            for row in rows:
                place = f"{path}, line {rows.line_num}"
                if len(row) not in (0, len(names)):
                    raise ValueError(f"it has {len(row)} values for {len(names)} columns")
                if row:
                    yield place, dict(zip(names, row, strict=True))
        except (ValueError, csv.Error) as error:
            # A ValueError is raised for text that is not UTF-8, too.
            why = str(error)[:200]
            raise DataError(
                f"{place} is no table: {why}.\n  a table is:  a line of names such as "
                "prompt,answer, and a line for each row"
            ) from None


def _parquet(path: Path) -> Records:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names, groups = file.schema_arrow.names, file.metadata.num_row_groups
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(groups))
    except Exception as error:
        # Readers of hostile files fail with nearly every type there is.
        raise DataError(f"{path} is not Parquet: {str(error)[:200]}.") from None

    if twice := {name for name in names if names.count(name) > 1}:
        raise DataError(f"{path} has two columns {', '.join(sorted(twice))[:200]}.")
    most = MAX_GROWTH * max(path.stat().st_size, 1 << 20)
    _check_growth(size, most, path)
    return _numbered(path, _rows_of(file, most, path))


def _check_growth(size: int, most: int, path: Path) -> None:
    if size > most:
        raise DataError(
            f"{path} unpacks to {size} bytes or more, over {MAX_GROWTH} times its size.\n"
            "  try:  a file whose rows are not all the same"
        )


def _rows_of(file: Any, most: int, path: Path) -> Iterator[Any]:
    done = unpacked = 0
    try:
        for batch in file.iter_batches(ROWS_AT_ONCE):
            try:
                records = batch.to_pylist()
            except Exception:
                # One by one, so that the message names the row.
                records = (batch.slice(at, 1).to_pylist()[0] for at in range(len(batch)))
            for record in records:
                # Of a text that the file holds once for all rows no header says so.
                unpacked += _size(record)
                _check_growth(unpacked, most, path)
                yield record
                done += 1

    except CouplerError:
        raise
    except Exception as error:
        raise DataError(
            f"{path}, row {done} (from 0) cannot be read: {str(error)[:200]}.\n"
            "  try:  writing the file again"
        ) from None


def _size(value: Any) -> int:
    match value:
        case str() | bytes():
            return len(value)
        case dict():
            return sum(map(_size, value.values()))
        case list():
            return sum(map(_size, value))
    return 8


def _saved(path: Path, split: str, key: str) -> Records:
    try:
        from datasets import Dataset, load_from_disk  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{key}.source: {path} is a folder, which the package datasets reads.\n  try:  "
            "pip install datasets"
        ) from None

    try:
        saved = load_from_disk(str(path))
    except OSError:
        raise
    except Exception as error:  # whatever readers of damaged files fail with
        raise DataError(
            f"{key}.source: {path} cannot be read by datasets: {str(error)[:200]}.\n"
            "  try:  saving it again"
        ) from None
    if isinstance(saved, Dataset):
        if split:
            raise DataError(no_split(str(path), split, key))
        return _numbered(path, iter(saved))
    name = chosen(list(saved), split, path, key)
    return _numbered(f"{path}, split {name}", iter(saved[name]))


def _function(source: str, args: Mapping[str, Any], key: str) -> Records:
    try:
        function = resolve(source)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise DataError(f"{key}.source={source} cannot be imported: {error}") from error
    if not callable(function):
        raise DataError(f"{key}.source={source} is a {type(function).__name__}, not a function.")

    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise DataError(
            f"{key}.args does not fit {key}.source={source}: {error}.\n  it takes:  "
            f"{inspect.signature(function)}"
        ) from None
    return _called(function, args, source, key)


def _called(function: Any, args: Mapping[str, Any], source: str, key: str) -> Records:
    try:
        yield from _numbered(source, iter(function(**args)))
    except CouplerError:
        raise
    except (Exception, SystemExit) as error:  # the user's code
        raise DataError(
            f"{key}.source={source} raised {type(error).__name__}: {error}.\n  at:  "
            f"{place_of(error)}"
        ) from error


def _numbered(source: str | Path, records: Iterator[Any]) -> Records:
    return ((f"{source}, row {i} (from 0)", record) for i, record in enumerate(records))
