"""Trackers that come with core."""
