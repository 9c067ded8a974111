"""Fetch models and data sets of the Hugging Face Hub by their names."""

from __future__ import annotations

import os
import re
from pathlib import Path

from coupler.errors import CouplerError
from coupler.system.imports import present

NAME = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
MODEL = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py")
ROWS = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.md")
# Copies of a model in other formats.
LEFT_OUT = ("original/*", "onnx/*", "openvino/*")


def is_name(text: str) -> bool:
    """Tell whether ``text`` is ``ORG/NAME`` or ``ORG/NAME@REVISION``, and no path.

    A text whose first part is a folder here is a path, even where that folder has no
    such entry.
    """
    return bool(NAME.fullmatch(text)) and not os.path.exists(text.partition("/")[0])


def fetch(name: str, key: str, *, rows: bool = False) -> Path:
    """Return the folder of a model, or of a data set with ``rows``, in the Hub's cache.

    What is missing there is downloaded, without code of the repository being run.

    Raises:
        CouplerError: there is no such repository, it is not open to this user, or the
            Hub cannot be reached and the cache has none.
    """
    hub = present("huggingface_hub", "transformers")
    found = NAME.fullmatch(name)
    assert found, f"{name} is no name of a repository"
    kind = "dataset" if rows else "model"

    try:
        folder = hub.snapshot_download(
            found["repo"],
            repo_type=kind,
            revision=found["revision"],
            allow_patterns=[*(ROWS if rows else MODEL)],
            ignore_patterns=[*LEFT_OUT],
        )
    except Exception as error:
        # Of the network, the Hub, the disk and the name: too many types to list.
        raise CouplerError(f"{key}={name} {_why(error, found['repo'], rows)}") from None
    return Path(folder)


def _why(error: Exception, repo: str, rows: bool) -> str:
    """Say what went wrong, and what to type."""
    kind = "data set" if rows else "model"
    local = f"hf download {'--repo-type dataset ' if rows else ''}{repo} --local-dir FOLDER"

    match type(error).__name__:
        case "GatedRepoError":
            return (
                f"is a {kind} whose terms you have not accepted on its page of the Hub.\n"
                "  try:  accepting them, and  hf auth login"
            )
        case "RepositoryNotFoundError":
            return (
                f"is no file or folder here, and the Hub has no {kind} of that name that you may "
                "see.\n  try:  another spelling, or for a private one  hf auth login"
            )
        case "RevisionNotFoundError":
            return "names no revision of it.\n  try:  a branch, a tag or a commit behind the @"

    why = " ".join(str(error).split())[:200]
    return (
        f"is no file or folder here, and is not in the cache of the Hub, which cannot be asked: "
        f"{why}\n  try:  where there is a network:  {local}"
    )
