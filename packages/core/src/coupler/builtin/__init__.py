"""Core's own plugin: the transports and trackers that every installation has."""
