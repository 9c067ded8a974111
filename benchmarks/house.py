"""Count how core's folders and files import each other.

``python benchmarks/house.py`` prints how many entries stand at the top of core, how
many arrows of imports there are between them, on how many floors they stand (the
longest chain of imports), and how many arrows close a cycle. ``--root FOLDER`` counts
another checkout, for example one unpacked from ``git archive``.

Imports for type checkers count, imports of third parties do not.
"""

from __future__ import annotations

import argparse
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = "coupler"


def entries(root: Path) -> dict[str, set[str]]:
    """Return every folder and file at the top of core, and those that it imports.

    ``__init__`` is left out: it imports every public name.
    """
    sys.path.insert(0, str(root / "packages" / "core" / "src"))
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    imports: dict[str, set[str]] = {child: set() for child in graph.find_children(PACKAGE)}

    for entry in imports:
        for module in (entry, *graph.find_descendants(entry)):
            for imported in graph.find_modules_directly_imported_by(module):
                other = ".".join(imported.split(".")[:2])
                if other in imports and other != entry:
                    imports[entry].add(other)
    return imports


def floors(imports: dict[str, set[str]]) -> tuple[int, int]:
    """Return the length of the longest chain, and the arrows that must go for one.

    An arrow of a cycle is left out, and counted, until no cycle is left.
    """
    rest, upward = {entry: set(others) for entry, others in imports.items()}, 0
    while True:
        try:
            order = list(TopologicalSorter(rest).static_order())
            break
        except CycleError as error:
            # Each element of the cycle is imported by the next.
            imported, importer = error.args[1][:2]
            rest[importer].discard(imported)
            upward += 1

    floor: dict[str, int] = {}
    for entry in order:
        floor[entry] = 1 + max((floor[other] for other in rest[entry]), default=0)
    return max(floor.values()), upward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count")
    imports = entries(parser.parse_args().root.resolve())

    height, upward = floors(imports)
    print("| entries | arrows | floors | arrows of cycles |")
    print("|---|---|---|---|")
    print(f"| {len(imports)} | {sum(map(len, imports.values()))} | {height} | {upward} |")


if __name__ == "__main__":
    main()
