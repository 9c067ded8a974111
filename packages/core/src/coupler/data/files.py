"""Find the files of a source of data: one, those of a pattern, or those of a folder.

A folder is laid out as the Hugging Face Hub has it: ``train.jsonl``,
``train-00000-of-00002.parquet``, ``data/train-*.parquet`` or ``train/0000.parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path

from coupler.data.hub import fetch, is_name
from coupler.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
# Files that save_to_disk of the package datasets writes.
SAVED = ("dataset_dict.json", "state.json")
# Files of JSON that describe a folder of data and hold no rows.
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "config.json")
SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
# The words by which the package datasets tells the split of a file.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
WHOLE = "train"  # the split of files whose names tell none, as in the package datasets
MAY_BE = (
    "  it may be:  FILE.jsonl, FILE.json, FILE.parquet, FILE.csv, FILE.tsv, a pattern such as "
    "'data/*.parquet', a folder of such files or of datasets' save_to_disk, ORG/NAME of the "
    "Hugging Face Hub, module:function"
)


def is_function(source: str) -> bool:
    """Tell whether ``source`` names a function, and no file."""
    return ":" in source and Path(source).suffix not in SUFFIXES


def files(source: str, split: str, key: str) -> list[Path]:
    """Return the files of ``source`` in order, or the folder of a saved dataset.

    Raises:
        DataError: there are none, they are nothing that can be read, shards are
            missing, or a folder has no such split or several to choose from.
    """
    path = Path(source)
    if path.suffix not in SUFFIXES and is_name(source):
        path = fetch(source, f"{key}.source", rows=True)
    if path.is_dir():
        if any((path / name).is_file() for name in SAVED):
            return [path]
        return _of_folder(path, split, key)

    if split:
        raise DataError(no_split(source, split, key))
    if has_magic(source) and not path.exists():
        found = [Path(each) for each in sorted(glob(source, recursive=True))]
        if not found:
            raise DataError(
                f"{key}.source={source} matches no file.\n  it is looked up from:  {Path.cwd()}"
            )
        for each in found:
            _check_suffix(each, key)
        return found

    _check_suffix(path, key)
    if not path.is_file():
        raise DataError(
            f"{key}.source: there is no file {path}.\n  it is looked up from:  {Path.cwd()}"
        )
    return [path]


def chosen(splits: Sequence[str], wanted: str, folder: Path, key: str) -> str:
    """Return the split to read: ``wanted``, or the only one.

    Raises:
        DataError: there is no such split, or several and none is wanted.
    """
    if wanted in splits:
        return wanted
    if not wanted and len(splits) == 1:
        return splits[0]

    names = ", ".join(splits)
    if not wanted:
        first = splits[0]
        if WHOLE in splits:
            first = WHOLE
        raise DataError(
            f"{key}.source={folder} has several splits: {names}.\n  try:  {key}.split={first}"
        )
    close = get_close_matches(wanted, splits, n=1)
    raise DataError(
        f"{key}.split={wanted}: {folder} has no such split.\n  it has:  {names}"
        + (f"\n  did you mean:  {key}.split={close[0]}" if close else "")
    )


def no_split(source: str, split: str, key: str) -> str:
    """Say that ``source`` is no folder that has splits."""
    return f"{key}.split={split}, but {key}.source={source} has no splits.\n  try:  {key}.split=''"


def _of_folder(folder: Path, split: str, key: str) -> list[Path]:
    """Return the files of a split of ``folder``, or of ``folder/data``."""
    for place in (folder, folder / "data"):
        apart = [inner for inner in _folders(place) if _split_word(inner.name)]
        found = _rows_in(place) or [file for inner in apart for file in _rows_in(inner)]
        if found:
            break
    else:
        raise DataError(_without_rows(folder, key))

    by_split: dict[str, list[Path]] = {}
    for file in found:
        by_split.setdefault(_split(file, place), []).append(file)
    # Beside files that tell their split, another is no data.
    rest = by_split.pop("", [])
    if not by_split:
        by_split[WHOLE] = rest

    name = chosen(list(by_split), split, folder, key)
    _check_one_format(by_split[name], name, folder, key)
    return _whole(by_split[name], key)


def _without_rows(folder: Path, key: str) -> str:
    """Say that a folder has no rows, and which of its folders have."""
    what = f"{key}.source={folder} is a folder without a file of rows"
    inner = [each.name for each in _folders(folder) if _has_rows(each)]
    if not inner:
        return f"{what}.\n{MAY_BE}"
    return (
        f"{what}, but its folders have: {', '.join(inner)}.\n"
        f"  try:  {key}.source={folder / inner[0]}"
    )


def _check_one_format(found: list[Path], split: str, folder: Path, key: str) -> None:
    """Refuse a split in several formats, which may hold the same rows twice."""
    suffixes = sorted({file.suffix for file in found})
    if len(suffixes) > 1:
        raise DataError(
            f"{key}.source={folder} has files of {split} as {' and '.join(suffixes)}.\n"
            f"  try:  {key}.source='{found[0].parent}/*{suffixes[0]}'"
        )


def _rows_in(folder: Path) -> list[Path]:
    """Return the files of rows that lie in ``folder`` itself."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        file
        for file in inside
        if file.suffix in SUFFIXES and file.name not in NO_ROWS and file.is_file()
    ]


def _folders(folder: Path) -> list[Path]:
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [each for each in inside if each.is_dir() and not each.name.startswith(".")]


def _has_rows(folder: Path) -> bool:
    return bool(_rows_in(folder)) or any(_rows_in(inner) for inner in _folders(folder))


def _split(file: Path, folder: Path) -> str:
    """Return the split that the name of a file tells, or of its folder in ``folder``.

    The text is empty where they tell none.
    """
    shard = SHARD.fullmatch(file.stem)
    if shard and file.parent == folder:
        return shard["name"]
    if shard:
        return _split_word(file.parent.name)
    own = _split_word(file.stem)
    if own or file.parent == folder:
        return own
    return _split_word(file.parent.name)


def _split_word(name: str) -> str:
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, known in SPLITS.items() if {*known} & {*words}), "")


def _check_suffix(path: Path, key: str) -> None:
    if path.suffix in SUFFIXES:
        return
    raise DataError(f"{key}.source={path} is nothing that can be read.\n{MAY_BE}")


def _whole(found: list[Path], key: str) -> list[Path]:
    """Refuse files among which shards are missing."""
    shards: dict[tuple[Path, str, int], set[int]] = {}
    for path in found:
        if shard := SHARD.fullmatch(path.stem):
            of = (path.parent, shard["name"], int(shard["count"]))
            shards.setdefault(of, set()).add(int(shard["number"]))

    for (folder, name, count), numbers in shards.items():
        if missing := sorted({*range(count)} - numbers):
            raise DataError(
                f"{key}.source: {len(missing)} of the {count} shards of {name} in {folder} are "
                f"missing, the first is {name}-{missing[0]:05}-of-{count:05}.\n"
                "  try:  downloading the dataset again"
            )
    return found
