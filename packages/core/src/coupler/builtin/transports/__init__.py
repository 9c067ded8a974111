"""Transports that come with core."""
