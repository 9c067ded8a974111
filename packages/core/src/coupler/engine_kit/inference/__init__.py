"""Offer parts that rollouts of inference engines share, for plugins to build upon."""
