"""Offer parts that backends share, for plugins to build upon."""

from coupler.system.gpu import gpu_is_visible
from coupler.system.hashing import write_file
from coupler.system.process_memory import resident_bytes
from coupler.system.seeding import derive

__all__ = ["derive", "gpu_is_visible", "resident_bytes", "write_file"]
