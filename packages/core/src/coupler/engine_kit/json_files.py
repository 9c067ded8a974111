"""Read JSON that others wrote: of models, adapters and checkpoints.

A pipe in the place of a file, lists in lists without an end, and bytes that are no text
are damage like any other.
"""

from __future__ import annotations

from coupler.system.files import DamagedFile, read_json

__all__ = ["DamagedFile", "read_json"]
