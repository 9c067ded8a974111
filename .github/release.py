"""Prepare the packages of a release: ``python .github/release.py TAG REPOSITORY_URL``.

It holds the tag against the version of every package and against CHANGELOG.md, and
writes the address of the repository into the metadata. CI runs it before it builds.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(root: Path, tag: str) -> list[str]:
    """Return in words what keeps the checkout from being released as ``tag``."""
    version = tag.removeprefix("v")
    found = []
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        if project["version"] != version:
            found.append(f"{path.relative_to(root)} has version {project['version']}")

    if not re.search(rf"^## {re.escape(version)}\b", (root / "CHANGELOG.md").read_text(), re.M):
        found.append(f"CHANGELOG.md has no section '## {version}'")
    return found


def add_urls(root: Path, address: str) -> None:
    """Write the address of the repository into the metadata of every package."""
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        text = path.read_text()
        urls = (
            f'[project.urls]\nSource = "{address}"\nIssues = "{address}/issues"\n'
            f'Changelog = "{address}/blob/main/CHANGELOG.md"\n\n'
        )
        path.write_text(text.replace("[dependency-groups]", urls + "[dependency-groups]", 1))


def main() -> int:
    tag, address = sys.argv[1:]
    if found := problems(ROOT, tag):
        print(f"{tag} cannot be released: {'; '.join(found)}.", file=sys.stderr)
        return 2
    add_urls(ROOT, address.rstrip("/"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
