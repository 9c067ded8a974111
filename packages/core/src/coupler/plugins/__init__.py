"""Plugins: how backends are declared, found and chosen."""

from coupler.plugins.backend import Backend, Kind
from coupler.plugins.hooks import hookimpl

__all__ = ["Backend", "Kind", "hookimpl"]
