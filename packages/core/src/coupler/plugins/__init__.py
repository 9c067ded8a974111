"""Declare, find and choose backends."""

from coupler.plugins.backend import Backend, Kind
from coupler.plugins.hooks import hookimpl

__all__ = ["Backend", "Kind", "hookimpl"]
