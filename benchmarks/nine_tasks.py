"""What each page of ``docs/tasks`` takes in an empty environment.

    python benchmarks/nine_tasks.py [PAGE ...]     # for example resume serve

For each page the commit that is checked out is cloned into a new folder, and the page's
own commands run there, from ``make setup`` on, with a home that is empty. Downloads are
those of uv's cache, as far as it has them: ``--cold`` gives uv an empty one too.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from pages import TASKS, Ran, commands, play  # noqa: E402

SHOWN = ("torch", "transformers", "ray")
HEAD = "| page | commands | minutes | of which `make setup` |\n|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", nargs="*", help="default: all nine")
    parser.add_argument("--cold", action="store_true", help="download all that is installed")
    arguments = parser.parse_args()
    wanted = arguments.page or [page.stem for page in TASKS]
    if unknown := {*wanted} - {page.stem for page in TASKS}:
        parser.error(f"there is no page {', '.join(sorted(unknown))}")

    print(_machine(), "", HEAD, sep="\n", flush=True)
    for page in TASKS:
        if page.stem in wanted:
            ran = _played(page, arguments.cold)
            seconds, setup = sum(each.seconds for each in ran), ran[0].seconds
            row = f"[{page.stem}](tasks/{page.name}) | {len(commands(page))}"
            print(f"| {row} | {seconds / 60:.1f} | {setup / 60:.1f} |", flush=True)
    return 0


def _played(page: Path, cold: bool) -> list[Ran]:
    """Clone the repository, and run the commands of a page in the clone."""
    with tempfile.TemporaryDirectory(prefix="task-") as name:
        folder = Path(name) / "coupler"
        clone = [shutil.which("git") or "git", "clone", "--quiet", str(ROOT), str(folder)]
        subprocess.run(clone, check=True)
        ran = []
        for each in play(page, folder, _empty(Path(name), cold)):
            print(f"{each.seconds:7.1f} s  {each.command[:90]}", file=sys.stderr, flush=True)
            ran.append(each)
        return ran


def _empty(folder: Path, cold: bool) -> Mapping[str, str]:
    """Return an environment that leads to nothing of this checkout, and to no cache but
    uv's.
    """
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "HF_HOME", "MAKEFLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    cache = folder / "uv" if cold else Path(kept.get("UV_CACHE_DIR", Path.home() / ".cache/uv"))
    return kept | {"HOME": str(folder / "home"), "UV_CACHE_DIR": str(cache)}


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in SHOWN)
    return (
        f"Python {platform.python_version()}, {packages}, {os.cpu_count()}-core "
        f"{platform.machine()} machine, load {os.getloadavg()[0]:.1f}, "
        f"{datetime.now(UTC):%Y-%m-%d}"
    )


if __name__ == "__main__":
    sys.exit(main())
