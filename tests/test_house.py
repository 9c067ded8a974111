"""The tree stays easy to find one's way in: few rooms, a thin kernel, short files and
functions.

``python tests/test_house.py`` writes the table of lines in ARCHITECTURE.md again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "packages" / "core" / "src" / "coupler"
KERNEL = (
    "batch", "interfaces", "plugins", "config", "worker", "loop",
    "executors/__init__.py", "executors/handle.py", "executors/local.py",
)  # fmt: skip
NOT_KERNEL = "worker/torch"
MAX_KERNEL, MAX_ENTRIES, MAX_FILE, MAX_FUNCTION = 6400, 20, 400, 65
# They lead to the rooms: the public names, and python -m coupler.
DOORS = ("__init__.py", "__main__.py")
START, END = "Lines, docstrings included, blank ones not:", "## How a step goes"
STEP = 100  # lines to which the table rounds


def lines(path: Path) -> int:
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(written(file.read_text().splitlines()) for file in files)


def written(source: list[str]) -> int:
    """Count the lines that are not blank, since blank lines cost a reader nothing."""
    return sum(bool(line.strip()) for line in source)


def kernel() -> int:
    return sum(lines(CORE / part) for part in KERNEL) - lines(CORE / NOT_KERNEL)


def rooms() -> dict[str, int]:
    entries = sorted(
        path
        for path in CORE.iterdir()
        if path.name not in DOORS and (path.suffix == ".py" or (path / "__init__.py").exists())
    )
    return {path.name: lines(path) for path in entries}


def table() -> str:
    cells = ", ".join(f"`{name}` {rounded(number)}" for name, number in rooms().items())
    kernel_rooms = ", ".join(KERNEL[:6])
    limit = f"{rounded(kernel())}, at most {MAX_KERNEL}"
    return f"{START}\n{cells}.\nThe kernel ({kernel_rooms} and the local executor) has {limit}.\n\n"


def rounded(number: int) -> int:
    return STEP * -(-number // STEP)


def shown() -> dict[str, int]:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    part = text[text.index(START) : text.index(END)]
    return {name: int(number) for name, number in re.findall(r"`(\S+)` (\d+)", part)}


def functions(file: Path) -> Iterator[tuple[str, int]]:
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = source.splitlines()[node.lineno - 1 : node.end_lineno]
            yield f"{file.relative_to(ROOT)}:{node.name}", written(body)


def test_the_kernel_is_thin() -> None:
    assert kernel() <= MAX_KERNEL


def test_core_has_few_rooms() -> None:
    assert len(rooms()) <= MAX_ENTRIES


def test_files_and_functions_are_short() -> None:
    files = [
        file for file in ROOT.glob("packages/*/src/**/*.py") if "conformance" not in file.parts
    ]
    assert len(files) > 100
    assert not {
        str(file.relative_to(ROOT)): lines(file) for file in files if lines(file) > MAX_FILE
    }
    found = dict(each for file in files for each in functions(file))
    assert not {name: size for name, size in found.items() if size > MAX_FUNCTION}


def test_the_architecture_says_how_large_each_room_is() -> None:
    said = shown()
    assert said.keys() == rooms().keys()
    assert not {
        name: (number, said[name])
        for name, number in rooms().items()
        if abs(number - said[name]) > 2 * STEP
    }


if __name__ == "__main__":
    page = ROOT / "ARCHITECTURE.md"
    text = page.read_text()
    start = text.index(START) if START in text else text.index("KERNEL\n")
    page.write_text(text[:start] + table() + text[text.index(END) :])
