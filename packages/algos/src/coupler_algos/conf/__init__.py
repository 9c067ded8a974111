"""Presets: YAML files that Hydra finds under ``algorithm``."""
