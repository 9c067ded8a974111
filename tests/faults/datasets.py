"""Give commands odd data sets."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.faults import run
from tests.faults.commands import HEAVY, Commands, Ended
from tests.faults.toy_runs import OPTIONS, write_inputs

FINE, WRONG, EITHER = "fine", "wrong", "either"
MOST_BYTES = 1 << 30
GOOD = {"prompt": "what is 1 + 2 ?", "answer": "3"}


@dataclass(frozen=True, slots=True)
class Row:
    """Holds an odd row, and whether a command may take it."""

    name: str
    value: Any
    # For training by samples and for evaluation, and for supervised training.
    expected: str
    supervised: str = ""


def check(seed: int, cases: int) -> Iterator[str]:
    """Yield a line for each data set that is not taken honestly or refused by a row."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as name, Commands(HEAVY) as commands:
        folder = Path(name)
        write_inputs(folder)
        for number in range(cases):
            yield from _try(commands, folder, folder / f"case{number}", chance)


def size_of_space() -> int:
    """Return how many distinct cases there are."""
    rows, jobs, places = len(ROWS), 3, 12
    tables = sum(1 for row in TABLES)
    return rows * jobs * places * 3 + tables * jobs * places + len(FILES) * jobs * 12


def _try(commands: Commands, folder: Path, case: Path, chance: random.Random) -> Iterator[str]:
    case.mkdir()
    job = chance.choice(("train", "sft", "eval"))
    kind = chance.choice(("row", "row", "table", "file"))
    path, what, expected, count, row = {"row": _row, "table": _table, "file": _file}[kind](
        case, job, chance
    )
    ended = commands.run(*_arguments(folder, path, case / "run", job), limit_s=60)
    why = _problem(ended, expected, count, row, case, job)
    if why:
        shown = what.encode("ascii", "backslashreplace").decode()[:200]
        yield f"{job} {shown}: {why}: {ended.text[-700:]}"
    yield from _unlike(commands, folder, path, case, job, ended)
    shutil.rmtree(case, ignore_errors=True)


def _unlike(
    commands: Commands, folder: Path, path: str, case: Path, job: str, ended: Ended
) -> Iterator[str]:
    """Compare the verdict of ``doctor data`` with that of the job."""
    given = _arguments(folder, path, case / "other", job)[1:]
    algorithm = ["algorithm=sft"] if job == "sft" else []
    examined = commands.run("doctor", "data", *given, *algorithm, limit_s=60)

    refused, said = ended.code == 2, examined.code
    if examined.raised or said != (2 if refused else 0):
        what = f"{job} of {path} ended with {ended.code}, and doctor data with {said}"
        yield f"{what}: {ended.text[-300:]}: {examined.raised}{examined.text[-700:]}"


def _arguments(folder: Path, path: str, run_dir: Path, job: str) -> list[str]:
    key = "eval.data" if job == "eval" else "data"
    options = [option for option in OPTIONS if not option.startswith(("data.", "algorithm="))]
    return [
        job,
        *options,
        *(["algorithm=toy"] if job != "eval" else []),
        f"{key}.source='{path}'",
        f"{key}.max_prompt_tokens=64",
        f"model.path={folder / 'toy'}",
        f"reward.target={folder / 'reward.py'}:score",
        f"run_dir={run_dir}",
        "steps=1",
        "prompts_per_step=1",
        "checkpoint.export=false",
        *(["eval.max_tokens=2"] if job == "eval" else []),
    ]


def _problem(
    ended: Ended, expected: str, count: int | None, row: int | None, case: Path, job: str
) -> str:
    taken = ended
    if job == "sft" and ended.raised.startswith("KeyError: \"the batch has no column 'group'"):
        # The toy loss is for samples: the rows were taken, and the first step began.
        taken = replace(ended, code=0, raised="", text=ended.text.replace("Traceback", ""))
    ended = taken
    if why := ended.problem():
        return why
    if ended.grown_bytes > MOST_BYTES:
        return f"it takes {ended.grown_bytes >> 20} MiB"
    said = "\n".join(ended.complaint)
    if ended.code == 2:
        if expected == FINE:
            return "it is refused"
        if row is not None and not re.search(rf"\b(line {row + 1}|row {row})\b", said):
            return f"the answer does not name row {row}"
        return "" if "data.source" in said or str(case) in said else "the answer names no source"
    if expected == WRONG:
        return "it is accepted"
    return _lost(ended, count, case, job)


def _lost(ended: Ended, count: int | None, case: Path, job: str) -> str:
    """Return how many rows were lost without a word."""
    if count is None or "dropped" in ended.text:
        return ""
    if job == "eval":
        found = len((case / "run" / "eval.jsonl").read_text().splitlines())
    else:
        said = re.search(r"([\d,.]+) steps? per epoch", ended.text)
        found = int(float(said.group(1).replace(",", ""))) if said else -1
    return "" if found == count else f"{found} of {count} rows were taken"


def _row(case: Path, job: str, chance: random.Random) -> tuple[str, str, str, int, int | None]:
    """Put an odd row among good ones."""
    odd = chance.choice(ROWS)
    count = chance.choice((1, 2, 3, 5))
    at = chance.randrange(count)
    form = chance.choice(("jsonl", "jsonl", "json", "parquet"))
    rows: list[Any] = [GOOD] * count
    rows[at] = odd.value
    path = case / f"rows.{form}"
    if form == "parquet" and not _write_table(rows, path):
        path = case / "rows.jsonl"
    if path.suffix == ".jsonl":
        path.write_text("".join(_text(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text("[" + ",".join(map(_text, rows)) + "]", encoding="utf-8")
    expected = odd.supervised if job == "sft" and odd.supervised else odd.expected
    named = at if path.suffix != ".json" or not isinstance(odd.value, str) else None
    return str(path), f"{odd.name} as {path.name} {at}/{count}", expected, count, named


def _text(row: Any) -> str:
    return row if isinstance(row, str) else json.dumps(row)


def _write_table(rows: list[Any], path: Path) -> bool:
    """Write rows to Parquet, and tell whether that can hold them."""
    import pyarrow
    import pyarrow.parquet

    if not all(isinstance(row, dict) for row in rows):
        return False
    keys = list(dict.fromkeys(key for row in rows for key in row))
    try:
        table = pyarrow.table({key: [row.get(key) for row in rows] for key in keys})
        pyarrow.parquet.write_table(table, path)
        return pyarrow.parquet.read_table(path).to_pylist() == [
            {key: row.get(key) for key in keys} for row in rows
        ]
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
        return False


def _table(case: Path, job: str, chance: random.Random) -> tuple[str, str, str, int, int | None]:
    """Write a table of Parquet whose column has an odd type."""
    import pyarrow
    import pyarrow.parquet

    name = chance.choice(sorted(TABLES))
    make, expected = TABLES[name]
    count = chance.choice((1, 2, 3, 7))
    columns: dict[str, Any] = {"prompt": ["a b"] * count, "answer": ["3"] * count}
    columns |= make(pyarrow, count)
    pairs = [(key, value) for key, value in columns.items() if value is not None]
    table = pyarrow.Table.from_arrays(
        [
            v if isinstance(v, pyarrow.Array | pyarrow.ChunkedArray) else pyarrow.array(v)
            for _, v in pairs
        ],
        names=[key.rstrip("#") for key, _ in pairs],
    )
    codec = chance.choice(("none", "snappy", "gzip", "zstd", "lz4"))
    pyarrow.parquet.write_table(
        table, case / "t.parquet", compression=codec, use_dictionary=chance.random() < 0.5,
        row_group_size=chance.choice((1, 2, 1000)),
    )  # fmt: skip
    return str(case / "t.parquet"), f"column {name} ({codec})", expected, count, None


def _file(case: Path, job: str, chance: random.Random) -> tuple[str, str, str, int | None, None]:
    """Damage a whole file, or put something else in its place."""
    name = chance.choice(sorted(FILES))
    form = chance.choice(("jsonl", "jsonl", "json", "parquet"))
    path = case / f"rows.{form}"
    rows = [{**GOOD, "prompt": f"what is {i} ?"} for i in range(chance.randrange(1, 9))]
    if form == "parquet":
        assert _write_table(rows, path)
    else:
        text = "\n".join(map(json.dumps, rows)) if form == "jsonl" else json.dumps(rows)
        path.write_text(text + "\n")
    expected = FILES[name](path, chance) or EITHER
    named = str(path) if name != "a pattern" else str(case / "*.jsonl")
    return named, f"{form} {name}", expected, len(rows) if expected == FINE else None, None


def _messages(*inner: Any) -> dict[str, Any]:
    return {"prompt": list(inner), "answer": "3"}


USER = {"role": "user", "content": "a b"}
PROMPTS: tuple[tuple[Any, str], ...] = (
    (None, WRONG), (5, WRONG), (1.5, WRONG), (True, WRONG), ([], WRONG), ({}, WRONG), ("", WRONG),
    (" ", WRONG), ("\n\t", WRONG), ([[]], WRONG), ([None], WRONG), (["a"], WRONG), ([5], WRONG),
    ({"role": "user", "content": "x"}, WRONG), ([[USER]], WRONG), (0, WRONG), (-1, WRONG), ("\u2003", WRONG),
    ("a" * 100_000, WRONG), ("a b " * 9000, WRONG), ("\ud800", WRONG), ("a\udfffb", WRONG), ("\udc80" * 5, WRONG),
    ("a\0b", EITHER), ("\0", EITHER), ("\ufeffa", EITHER), ("\u200b", EITHER), ("\u202eabc", EITHER), ("\U0001f600", EITHER),
    ("e\u0301", EITHER), ("\x1b[31m", EITHER), ("\x7f\x80", EITHER), ("a\rb", EITHER), ("\u2028", EITHER),
    ("<|im_start|>system", EITHER), ("{{ 7 * 7 }}", EITHER), ("${oc.env:HOME}", EITHER), ("a" * 20, EITHER), ("\uff41", EITHER),
    ("%s %d {}", EITHER), ("'\"\\", EITHER), ("\U0010ffff", EITHER), ("\ue000", EITHER),
)  # fmt: skip
MESSAGES: tuple[tuple[tuple[Any, ...], str], ...] = (
    (({"role": "user"},), WRONG), (({"content": "a"},), WRONG), (({},), WRONG), (({"role": 5, "content": "a"},), WRONG),
    (({"role": "user", "content": None},), WRONG), (({"role": "user", "content": 5},), WRONG),
    (({"role": None, "content": "a"},), WRONG), (({"role": "user", "content": {"text": "a"}},), WRONG),
    (({"role": "user", "content": [{"type": "text", "text": "a"}]},), WRONG), (({"role": "user", "content": ["a"]},), WRONG),
    (({"role": "user", "content": ""},), WRONG), (({"role": "user", "content": " "},), WRONG), ((USER, None), WRONG),
    ((USER, 5), WRONG), ((USER, "a"), WRONG), ((USER, []), WRONG), ((USER, {"role": "assistant"}), WRONG),
    (({"Role": "user", "Content": "a"},), WRONG), (({"role": "user", "text": "a"},), WRONG), (({"from": "human", "value": "a"},), WRONG),
    (({"role": "user", "content": "a\ud800"},), WRONG), (({"role": "us\udfffer", "content": "a"},), WRONG),
    ((USER,), FINE), ((USER, {"role": "assistant", "content": "b"}), EITHER), (({"role": "system", "content": "a"},), EITHER),
    (({"role": "wizard", "content": "a"},), EITHER), (({"role": "", "content": "a"},), EITHER), (({"role": "tool", "content": "a"},), EITHER),
    (({"role": "tool", "content": "a", "tool_call_id": "x"},), EITHER), ((USER, USER), EITHER), (({**USER, "name": "x"},), EITHER),
    (({**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},), EITHER), (({**USER, "tool_calls": 5},), EITHER),
    (({**USER, "tool_calls": [None]},), EITHER), (({**USER, "extra": {"a": [1]}},), EITHER), (tuple([USER] * 30), EITHER),
    (({"role": "<|im_start|>", "content": "a"},), EITHER), (({"role": "{{ x }}", "content": "a"},), EITHER), (({**USER, "x": float("nan")},), EITHER),
    (({**USER, "x": "\ud800"},), WRONG), (({"role": "a" * 9000, "content": "a"},), EITHER), (tuple([USER] * 3000), WRONG),
)  # fmt: skip
ANSWERS: tuple[tuple[Any, str, str], ...] = (
    (None, WRONG, WRONG), (5, EITHER, EITHER), (1.5, EITHER, EITHER), (True, EITHER, EITHER), ([], EITHER, EITHER), ({}, EITHER, EITHER),
    ("", EITHER, WRONG), (" ", EITHER, EITHER), (float("nan"), WRONG, WRONG), (float("inf"), WRONG, WRONG), (float("-inf"), WRONG, WRONG),
    ([1, [2]], EITHER, EITHER), ({"a": 1}, EITHER, EITHER), ("\ud800", WRONG, WRONG), (["\udc00"], WRONG, WRONG), ("a" * 200_000, EITHER, EITHER),
    (10**30, WRONG, WRONG), (2**62, EITHER, EITHER), ("<|im_end|>", EITHER, EITHER), ("\0", EITHER, EITHER), ([None], EITHER, EITHER), ("\U0001f600", EITHER, EITHER),
    (-0.0, EITHER, EITHER), (1e300, EITHER, EITHER), ([float("inf")], WRONG, WRONG), ({"\ud800": 1}, WRONG, WRONG), ("a\r\nb", EITHER, EITHER),
)  # fmt: skip
EXTRAS: tuple[tuple[Any, str], ...] = (
    ("\ud800", WRONG), (float("nan"), FINE), (float("inf"), WRONG), (10**25, WRONG), ({"a": {"b": "\udfff"}}, WRONG), (None, FINE), ([], FINE),
    ({}, FINE), ("x" * 100_000, FINE), ([[[[1]]]], FINE), (True, FINE), (2**63, WRONG), ({"": 1}, FINE), ({"a": None}, FINE), ([None, 1], FINE),
)  # fmt: skip
DEEP = "[" * 300 + "]" * 300
TEXTS: tuple[tuple[str, str], ...] = (
    ("", EITHER), ("[1]", WRONG), ("5", WRONG), ('"x"', WRONG), ("null", WRONG), ("true", WRONG), ("{}", WRONG), ("[]", WRONG), ("{", WRONG), ("}", WRONG),
    ('{"prompt": "a", "answer": "b"', WRONG), ('{"prompt": "a" "answer": "b"}', WRONG), ("{'prompt': 'a', 'answer': 'b'}", WRONG), ('{prompt: "a"}', WRONG),
    ('{"prompt": "a", "answer": "b",}', WRONG), ('{"prompt": "a", "answer": "b"} x', WRONG), ('{"prompt": "a", "answer": "b"}{"prompt": "a", "answer": "b"}', WRONG),
    ('{"prompt": "a", "prompt": "b", "answer": "c"}', WRONG), ('{"prompt": "a", "answer": "c", "answer": "d"}', WRONG), ('{"prompt": "a", "answer": "c", "x": 1, "x": 2}', WRONG),
    ('{"prompt": "a", "answer": NaN}', WRONG), ('{"prompt": "a", "answer": Infinity}', WRONG), ('{"prompt": "a", "answer": -Infinity}', WRONG), ('{"prompt": NaN, "answer": "b"}', WRONG),
    ('{"prompt": "a", "answer": 1e999}', WRONG), ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", WRONG), ('{"prompt": "a", "answer": 0x1}', WRONG), ('{"prompt": "a", "answer": 01}', WRONG),
    ('{"prompt": "a", "answer": "\\x"}', WRONG), ('{"prompt": "a", "answer": "\\ud800"}', WRONG), ('{"prompt": "a", "answer": "\\uZZZZ"}', WRONG), ('{"prompt": "a\tb", "answer": "c"}', WRONG),
    ('{"promt": "a", "answer": "b"}', WRONG), ('{"Prompt": "a", "answer": "b"}', WRONG), ('{"prompt ": "a", "answer": "b"}', WRONG), ('{"prompt": "a", "anwser": "b"}', WRONG),
    ('{"prompt": "a", "solution": "b"}', WRONG), ('{"prompt": "a", "answer": "b", "": 1}', FINE), ('{"question": "a", "answer": "b"}', WRONG), ("[" * 99_999, WRONG), ('{"a":' * 99_999, WRONG),
    ('{"prompt": "a", "answer": ' + DEEP + "}", WRONG), ('{"prompt": "a", "answer": "b", "x": ' + DEEP + "}", WRONG), ('{"prompt": ' + DEEP + ', "answer": "b"}', WRONG),
    ('{"prompt": "a", "answer": "b", "x": ' + "[" * 50 + "]" * 50 + "}", FINE), ("# comment", WRONG), ("// comment", WRONG), ("prompt,answer", WRONG), ("- prompt: a", WRONG), ("<row/>", WRONG),
    ('{"prompt": "a", "reward_model": {"ground_truth": "b"}}', FINE), ('{"prompt": "a", "reward_model": {}}', WRONG), ('{"prompt": "a", "reward_model": 5}', WRONG), ('{"prompt": "a", "answer": "b", "index": 7}', FINE),
    ('{"prompt": "a", "answer": "b", "completion": "x"}', FINE), ('{"prompt": "a", "answer": "b", "row": 1}', FINE), ('  {"prompt": "a", "answer": "b"}  ', FINE), ("\0", WRONG), ("\ufeff", WRONG),
)  # fmt: skip
ROWS: list[Row] = [
    *(Row(f"prompt {value!r:.40}", {"prompt": value, "answer": "3"}, expected) for value, expected in PROMPTS),
    *(Row(f"messages {inner!r:.60}", _messages(*inner), expected) for inner, expected in MESSAGES),
    *(Row(f"answer {value!r:.40}", {**GOOD, "answer": value}, one, two) for value, one, two in ANSWERS),
    *(Row(f"extra {value!r:.40}", {**GOOD, "x": value}, expected) for value, expected in EXTRAS),
    *(Row(f"text {text[:60]!r}", text, expected) for text, expected in TEXTS if text),
]  # fmt: skip

Make = Callable[[Any, int], dict[str, Any]]
TABLES: dict[str, tuple[Make, str]] = {
    "large string": (lambda pa, n: {"prompt": pa.array(["a b"] * n, pa.large_string())}, FINE),
    "dictionary": (lambda pa, n: {"prompt": pa.array(["a b"] * n).dictionary_encode()}, FINE),
    "string view": (lambda pa, n: {"x": pa.array(["a"] * n, pa.large_string())}, FINE),
    "binary prompt": (lambda pa, n: {"prompt": pa.array([b"a"] * n)}, WRONG),
    "binary extra": (lambda pa, n: {"x": pa.array([b"a"] * n)}, WRONG),
    "fixed binary": (lambda pa, n: {"x": pa.array([b"ab"] * n, pa.binary(2))}, WRONG),
    "null prompt": (lambda pa, n: {"prompt": pa.nulls(n)}, WRONG),
    "null answer": (lambda pa, n: {"answer": pa.nulls(n)}, WRONG),
    "null extra": (lambda pa, n: {"x": pa.nulls(n)}, FINE),
    "integer prompt": (lambda pa, n: {"prompt": pa.array([5] * n)}, WRONG),
    "boolean prompt": (lambda pa, n: {"prompt": pa.array([True] * n)}, WRONG),
    "date prompt": (lambda pa, n: {"prompt": pa.array([date(2024, 1, 1)] * n)}, EITHER),
    "date": (lambda pa, n: {"x": pa.array([date(2024, 1, 1)] * n)}, FINE),
    "time": (lambda pa, n: {"x": pa.array([time(1, 2)] * n)}, FINE),
    "timestamp": (lambda pa, n: {"x": pa.array([datetime(2024, 1, 1)] * n)}, FINE),
    "timestamp in nanoseconds": (lambda pa, n: {"x": pa.array([1] * n, pa.timestamp("ns"))}, EITHER),
    "timestamp far away": (lambda pa, n: {"x": pa.array([2**62] * n, pa.timestamp("us"))}, WRONG),
    "timestamp of a zone": (lambda pa, n: {"x": pa.array([1] * n, pa.timestamp("us", "Europe/Rome"))}, EITHER),
    "duration": (lambda pa, n: {"x": pa.array([timedelta(1)] * n)}, WRONG),
    "decimal": (lambda pa, n: {"answer": pa.array([Decimal("1.5")] * n)}, FINE),
    "large decimal": (lambda pa, n: {"x": pa.array([Decimal("1." + "1" * 50)] * n)}, FINE),
    "struct": (lambda pa, n: {"x": pa.array([{"a": 1}] * n)}, FINE),
    "list": (lambda pa, n: {"x": pa.array([[1, None]] * n)}, FINE),
    "map": (lambda pa, n: {"x": pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64()))}, FINE),
    "struct prompt": (lambda pa, n: {"prompt": pa.array([{"role": "user", "content": "a"}] * n)}, WRONG),
    "messages": (lambda pa, n: {"prompt": pa.array([[{"role": "user", "content": "a"}]] * n)}, FINE),
    "messages with nulls": (lambda pa, n: {"prompt": pa.array([[{"role": "user", "content": None}]] * n)}, WRONG),
    "float answer": (lambda pa, n: {"answer": pa.array([1.5] * n)}, FINE),
    "nan answer": (lambda pa, n: {"answer": pa.array([float("nan")] * n)}, WRONG),
    "nan extra": (lambda pa, n: {"x": pa.array([float("nan")] * n)}, FINE),
    "infinite extra": (lambda pa, n: {"x": pa.array([float("inf")] * n)}, WRONG),
    "half floats": (lambda pa, n: {"x": pa.array([1.5] * n, pa.float32())}, FINE),
    "unsigned": (lambda pa, n: {"x": pa.array([2**64 - 1] * n, pa.uint64())}, WRONG),
    "two columns of one name": (lambda pa, n: {"prompt#": pa.array(["c"] * n)}, WRONG),
    "two extras of one name": (lambda pa, n: {"x": pa.array([1] * n), "x#": pa.array([2] * n)}, WRONG),
    "no prompt": (lambda pa, n: {"prompt": None}, WRONG),
    "no answer": (lambda pa, n: {"answer": None}, WRONG),
    "no rows": (lambda pa, n: {"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, WRONG),
    "text that is not UTF-8": (lambda pa, n: {"prompt": _not_utf8(pa, n)}, WRONG),
    "extra that is not UTF-8": (lambda pa, n: {"x": _not_utf8(pa, n)}, WRONG),
    "deep": (lambda pa, n: {"x": _deep(pa, n)}, WRONG),
    "a column without a name": (lambda pa, n: {"": pa.array([1] * n)}, FINE),
    "empty structs": (lambda pa, n: {"x": pa.array([None] * n, pa.int8())}, FINE),
}  # fmt: skip


def _not_utf8(pa: Any, count: int) -> Any:
    data = pa.array([b"a\xff"] * count, pa.binary())
    return pa.Array.from_buffers(pa.string(), count, data.buffers())


def _deep(pa: Any, count: int) -> Any:
    value: Any = 1
    for _ in range(80):
        value = [value]
    return pa.array([value] * count)


def _bytes(change: Callable[[bytes, random.Random], bytes], expected: str = EITHER) -> Any:
    def damage(path: Path, chance: random.Random) -> str:
        path.write_bytes(change(path.read_bytes(), chance))
        return expected

    return damage


def _flip(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]


def _hole(content: bytes, chance: random.Random) -> bytes:
    at, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:at] + content[end:]


def _instead(make: Callable[[Path], object], expected: str = WRONG) -> Any:
    def damage(path: Path, _: random.Random) -> str:
        path.unlink()
        make(path)
        return expected

    return damage


def _linked(path: Path, _: random.Random) -> str:
    path.rename(path.with_name("real"))
    path.symlink_to("real")
    return FINE


def _bomb(path: Path) -> None:
    """Write a table whose rows are all the same, and many."""
    import pyarrow
    import pyarrow.parquet

    if path.suffix != ".parquet":
        path.write_bytes(zlib.compress(bytes(1 << 22)))
        return
    # With a dictionary a thousand million of equal texts take a few kilobytes.
    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 300_000, pyarrow.int8()), pyarrow.array(["x" * 100_000])
    )
    table = pyarrow.table({"prompt": text, "answer": text})
    pyarrow.parquet.write_table(table, path, compression="zstd")


def _archive(path: Path) -> None:
    import zipfile

    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("rows.jsonl", bytes(1 << 24))
    path.write_bytes(data.getvalue())


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


FILES: dict[str, Callable[[Path, random.Random], str | None]] = {
    "whole": lambda *_: FINE,
    "torn": _bytes(lambda content, chance: content[: chance.randrange(len(content))]),
    "torn at the start": _bytes(lambda content, chance: content[chance.randrange(1, 9) :], WRONG),
    "with a bit flipped": _bytes(_flip),
    "with a hole": _bytes(_hole),
    "with random bytes": _bytes(lambda content, chance: content[:9] + chance.randbytes(50) + content[9:]),
    "empty": _bytes(lambda *_: b"", WRONG),
    "of spaces": _bytes(lambda *_: b" \n\n ", WRONG),
    "zeros": _bytes(lambda content, _: bytes(len(content)), WRONG),
    "random": _bytes(lambda content, chance: chance.randbytes(len(content)), WRONG),
    "with a byte order mark": _bytes(lambda content, _: b"\xef\xbb\xbf" + content),
    "in UTF-16": _bytes(lambda content, _: content.decode("latin-1").encode("utf-16")),
    "in UTF-16 without a mark": _bytes(lambda content, _: content.decode("latin-1").encode("utf-16-le")),
    "in UTF-32": _bytes(lambda content, _: content.decode("latin-1").encode("utf-32")),
    "with Latin-1": _bytes(lambda content, _: content.replace(b"what", b"w\xe4s"), EITHER),
    "with carriage returns": _bytes(lambda content, _: content.replace(b"\n", b"\r\n")),
    "with blank lines": _bytes(lambda content, _: content.replace(b"\n", b"\n\n \n")),
    "doubled": _bytes(lambda content, _: content * 2),
    "with zeros at its end": _bytes(lambda content, _: content + bytes(64)),
    "HTML": _bytes(lambda *_: b"<!DOCTYPE html>\n<html>\n", WRONG),
    "a pointer of Git LFS": _bytes(lambda *_: b"version https://git-lfs.github.com/spec/v1\n", WRONG),
    "gzip": _bytes(lambda content, _: zlib.compress(content, wbits=31), WRONG),
    "a pickle": _bytes(lambda *_: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00", WRONG),
    "a bomb": _instead(_bomb),
    "an archive": _instead(_archive),
    "sparse": _instead(_sparse),
    "missing": _instead(lambda path: None),
    "a folder": _instead(Path.mkdir),
    "a pipe": _instead(os.mkfifo),
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a link to nothing": _instead(lambda path: path.symlink_to("nowhere")),
    "a link to /dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to /dev/null": _instead(lambda path: path.symlink_to("/dev/null")),
    "a link to memory": _instead(lambda path: path.symlink_to("/proc/self/mem")),
    "a link": _linked,
    "a pattern": lambda *_: WRONG,
    "one long line": _bytes(lambda content, _: content.replace(b"\n", b" ") + b"x" * 3_000_000),
    "nested": _bytes(lambda *_: b"[" * 999_999, WRONG),
    "a million braces": _bytes(lambda *_: b'{"a":' * 200_000, WRONG),
    "a footer of another file": _bytes(lambda content, _: content[:20] + b"PAR1" + content[-40:], EITHER),
}  # fmt: skip


if __name__ == "__main__":
    run(check, 300)
